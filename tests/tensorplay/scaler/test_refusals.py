"""What a scaler cannot work with, what disables it, and that a disabled one does nothing."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import tensorplay as tp

from mezzo.errors import DeviceError, ScalerProtocolError, ScalingError
from mezzo.tensorplay import GradScaler

from .runs import make, parameter, scaler_of


def test_float16_gradients_are_refused_by_name() -> None:
    model = tp.nn.Linear(2, 1).half()
    optimizer = tp.optim.SGD(model.named_parameters(), lr=1.0)
    scaler = scaler_of()
    for one in model.parameters():
        one.grad = tp.ones(*one.shape).to(tp.float16)
    scaler.scale(tp.ones(()))
    text = (
        r"Attempting to unscale FP16 gradients\. 2 parameter\(s\) of SGD have them: weight, bias\..*no model\.half\(\)"
    )
    for method in (scaler.step, scaler.unscale_):
        with pytest.raises(ScalingError, match=text):
            method(optimizer)
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_what_is_no_optimizer() -> None:
    scaler = scaler_of()
    scaler.scale(tp.ones(()))
    with pytest.raises(ScalerProtocolError, match=r"of type Linear for an optimizer, which has param_groups"):
        scaler.step(tp.nn.Linear(1, 1))


@pytest.mark.parametrize("device", ["xpu", "mps", "banana", 3, None])
def test_other_devices_are_refused(device: Any) -> None:
    with pytest.raises(DeviceError, match=r"GradScaler got device .*; allowed is 'cpu' or 'cuda'"):
        GradScaler(device)


def test_a_device_may_be_an_object() -> None:
    assert GradScaler(tp.ones(1).device).is_enabled()


@pytest.mark.skipif(tp.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_cuda_without_a_gpu_warns_in_the_packages_words_and_disables(device: str) -> None:
    text = r"^tensorplay\.cuda\.amp\.GradScaler is enabled, but CUDA is not available\.  Disabling\.$"
    with pytest.warns(UserWarning, match=text) as caught:
        scaler = GradScaler(device)
    assert not scaler.is_enabled()
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=text):
        assert not GradScaler().is_enabled()
    with pytest.warns(UserWarning, match=text):
        tp.amp.GradScaler("cuda")


def test_a_disabled_scaler_does_nothing() -> None:
    weight, optimizer = make("SGD")
    scaler = GradScaler("cuda", enabled=False)
    loss = (weight * weight).sum()
    assert scaler.scale(loss) is loss
    assert scaler.scale(word := ["no tensor"]) is word
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.update(3.0)
    assert weight.tolist() == [0.5, -1.0, 1.5]
    assert scaler.get_scale() == 1.0
    assert scaler._get_growth_tracker() == 0
    assert scaler.stepped(optimizer)
    assert scaler.nonfinite(optimizer) == ()
    assert (scaler.steps_taken(optimizer), scaler.skipped_in_a_row(optimizer)) == (0, 0)
    assert (scaler.get_growth_factor(), scaler.get_growth_interval()) == (2.0, 2000)


def test_a_disabled_scaler_takes_a_closure() -> None:
    weight = parameter(3.0)
    optimizer = tp.optim.LBFGS([weight])
    scaler = GradScaler("cpu", enabled=False)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = ((weight - 1) ** 2).sum()
        scaler.scale(loss).backward()
        return loss

    assert scaler.step(optimizer, closure).item() == 4.0
    assert weight.item() == 1.0


def test_it_is_a_scaler_of_the_package_with_its_signatures() -> None:
    assert issubclass(GradScaler, tp.amp.GradScaler)
    for name, method in vars(tp.amp.GradScaler).items():
        if name.startswith("_") or not callable(method):
            continue
        own = getattr(GradScaler, name)
        assert own is not method, f"{name} is inherited"
        assert list(inspect.signature(own).parameters) == list(inspect.signature(method).parameters)
    ours, theirs = inspect.signature(GradScaler).parameters, inspect.signature(tp.amp.GradScaler).parameters
    assert [(one.name, one.default) for one in theirs.values()] == [
        (one.name, one.default) for one in list(ours.values())[: len(theirs)]
    ]
