"""Trainings with the levels: how well they end, which steps they skip, and whose numbers theirs are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import mezzo.torch
from mezzo.apex import amp
from mezzo.apex.amp import casts

from .loops import NETS, Digits, accuracy, adam, convnet, copies, digits, mlp, same, sgd, train, watched
from .nets import LEVELS, scale

STEPS = 200
VARIANTS: dict[str, dict[str, Any]] = {
    "float16, dynamic": {"loss_scale": "dynamic"},
    "float16, static": {"loss_scale": "128.0"},
    "bfloat16": {"dtype": torch.bfloat16},
}
KINDS = {"sgd": sgd, "adam": adam}


@pytest.fixture(scope="module")
def data() -> Digits:
    return digits()


@pytest.fixture(scope="module")
def float32(data: Digits) -> dict[str, float]:
    """The accuracies of plain float32, without amp."""
    found = {}
    for name, net in NETS.items():
        model = net()
        optimizer = sgd(model)
        for inputs, labels in data.batches(STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        found[name] = accuracy(model, data)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("level", LEVELS)
def test_accuracy_ends_within_one_per_cent_of_float32(
    data: Digits, float32: dict[str, float], level: str, name: str, variant: str
) -> None:
    model = NETS[name]()
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0, **VARIANTS[variant])
    train(model, optimizer, data, STEPS)
    assert float32[name] > 0.93
    assert accuracy(model, data) >= float32[name] - 0.01


# Which steps are skipped


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_exactly_the_steps_whose_gradients_overflow_are_skipped(data: Digits, level: str, kind: str, name: str) -> None:
    """The scale grows after every third finite step, so float16 overflows over and over."""
    model = NETS[name]()
    model, optimizer = amp.initialize(
        model, KINDS[kind](model), opt_level=level, loss_scale="dynamic", max_loss_scale=2.0**40, verbosity=0
    )
    amp._amp_state.loss_scalers[0]._scale_seq_len = 3
    seen = watched(model, optimizer, data, 40)
    assert seen.stepped == seen.finite
    assert 4 <= seen.finite.count(False) <= 25
    expected, clean, found = 65536.0, 0, []
    for finite in seen.finite:
        clean = clean + 1 if finite else 0
        expected = expected * (2.0 if clean == 3 else 1.0) if finite else expected / 2.0
        clean = clean % 3
        found.append(expected)
    assert seen.scales == found


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_bfloat16_skips_nothing(data: Digits, level: str) -> None:
    model = convnet()
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, dtype=torch.bfloat16, verbosity=0)
    seen = watched(model, optimizer, data, 20)
    assert seen.stepped == [True] * 20
    assert seen.scales == [1.0] * 20


# Whose numbers theirs are


def _growing(scaler: Any) -> None:
    scaler._scale_seq_len = 4


def _of_amp(net: Callable[[], nn.Module], kind: str, level: str, data: Digits) -> tuple[Any, list[Tensor]]:
    model = net()
    model, optimizer = amp.initialize(model, KINDS[kind](model), opt_level=level, max_loss_scale=2.0**40, verbosity=0)
    _growing(amp._amp_state.loss_scalers[0])
    seen = watched(model, optimizer, data, 20)
    values = copies(amp.master_params(optimizer)) + copies(model.parameters()) + copies(model.buffers())
    return seen, values


def _by_hand(
    model: nn.Module,
    optimizer: Any,
    region: Any,
    call: Callable[[nn.Module, Tensor], Tensor],
    data: Digits,
) -> tuple[Any, list[Tensor]]:
    scaler = mezzo.torch.GradScaler("cpu", init_scale=2.0**16, growth_interval=4)
    scales, losses = [], []
    for inputs, labels in data.batches(20):
        optimizer.zero_grad()
        with region():
            loss = nn.functional.cross_entropy(call(model, inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    values = copies(amp.master_params(optimizer)) + copies(model.parameters()) + copies(model.buffers())
    return (scales, losses), values


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("kind", KINDS)
def test_o1_is_bit_for_bit_an_autocast_region_and_a_grad_scaler(data: Digits, kind: str, name: str) -> None:
    seen, values = _of_amp(NETS[name], kind, "O1", data)
    casts.stop()
    model = NETS[name]()
    (scales, losses), wanted = _by_hand(
        model,
        KINDS[kind](model),
        lambda: mezzo.torch.autocast("cpu", torch.float16, policy="apex-o1"),
        lambda model, inputs: model(inputs),
        data,
    )
    assert (seen.scales, seen.losses) == (scales, losses)
    assert False in seen.finite
    assert same(values, wanted)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("kind", KINDS)
def test_o2_is_bit_for_bit_a_prepared_model_and_a_grad_scaler(data: Digits, kind: str, name: str) -> None:
    seen, values = _of_amp(NETS[name], kind, "O2", data)
    model = NETS[name]()
    optimizer = KINDS[kind](model)
    keep = _BatchNorm if any(isinstance(one, _BatchNorm) for one in model.modules()) else ()
    mezzo.torch.prepare(model, optimizer, dtype=torch.float16, low="**", keep=keep, buffers=True)
    (scales, losses), wanted = _by_hand(
        model,
        optimizer,
        torch.enable_grad,
        lambda model, inputs: model(inputs.half()).float(),
        data,
    )
    assert (seen.scales, seen.losses) == (scales, losses)
    assert False in seen.finite
    assert same(values, wanted)


# One function for all levels


def _clip_norm(parameters: list[Tensor]) -> Tensor:
    return nn.utils.clip_grad_norm_(parameters, 0.1)


def _clip_value(parameters: list[Tensor]) -> Tensor:
    nn.utils.clip_grad_value_(parameters, 0.01)
    return torch.zeros(())


CLIPS = {"norm": _clip_norm, "value": _clip_value}


def users_step(
    model: nn.Module, optimizer: Any, batches: list[tuple[Tensor, Tensor]], clip: Callable[[list[Tensor]], Tensor]
) -> dict[str, Any]:
    """A step over micro-batches, clipped; then an evaluation, and what goes into a checkpoint."""
    model.train()
    optimizer.zero_grad()
    for inputs, labels in batches:
        loss = nn.functional.cross_entropy(model(inputs), labels) / len(batches)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    norm = clip(list(amp.master_params(optimizer)))
    gradients = copies(one.grad for one in amp.master_params(optimizer))
    optimizer.step()
    model.eval()
    with torch.no_grad():
        outputs = model(batches[0][0])
    return {"norm": norm.item(), "gradients": gradients, "outputs": outputs, "amp": amp.state_dict()}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("level", [*LEVELS, "off"])
def test_one_users_step_is_right_at_every_level(data: Digits, level: str, clip: str) -> None:
    batches = list(data.batches(3))
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options: dict[str, Any] = {"enabled": False} if level == "off" else {"opt_level": level, "loss_scale": 1024.0}
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **options)
    found = users_step(model, optimizer, batches, CLIPS[clip])

    plain = mlp()
    with amp.disable_casts():
        for inputs, labels in batches:
            (nn.functional.cross_entropy(plain(inputs), labels) / 3).backward()
    norm = CLIPS[clip](list(plain.parameters()))
    wanted = copies(one.grad for one in plain.parameters())
    if clip == "norm":
        assert norm > 0.2
        total = torch.stack([one.float().norm() for one in found["gradients"]]).norm()
        # A mean over products in float16, of 2**-11 each; and at O3 all gradients are rounded to it.
        torch.testing.assert_close(total, torch.tensor(0.1), rtol=1e-3, atol=0.0)
        assert found["norm"] == pytest.approx(norm.item(), rel=5e-3)
    else:
        assert max(float(one.abs().max()) for one in found["gradients"]) == pytest.approx(0.01, rel=1e-3)
    for one, other in zip(found["gradients"], wanted, strict=True):
        # Half the digits of float16, of the largest gradient: a ReLU is open or shut by the last of them.
        torch.testing.assert_close(one.float(), other, rtol=0.0, atol=2e-2 * float(other.abs().max()))
    with torch.no_grad(), amp.disable_casts():
        for one, gradient in zip(plain.parameters(), wanted, strict=True):
            one -= 0.5 * gradient
        torch.testing.assert_close(found["outputs"].float(), plain(batches[0][0]), rtol=0.0, atol=5e-3)
    assert len(found["amp"]) == (0 if level == "off" else 1)
    assert level == "off" or scale() == 1024.0
