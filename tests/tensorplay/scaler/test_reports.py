"""What the scaler tells: steps made and skipped, the parameters that were not finite, and NaN that stays."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from typing import Any

import pytest
import tensorplay as tp

from mezzo.errors import ScalerProtocolError, ScalingError
from mezzo.tensorplay.scaling.reports import NonFinite

from .runs import iterate, make, scaler_of


class Net(tp.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.body = tp.nn.Linear(2, 3)
        self.head = tp.nn.Linear(3, 1)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x))


def overflow(scaler: Any, net: Net, optimizer: Any) -> None:
    """Make the gradient of the head's weight infinite, one element of it NaN."""
    optimizer.zero_grad()
    scaler.scale(net(tp.ones(1, 2)).sum()).backward()
    net.head.weight.grad = tp.tensor([[math.inf, math.nan, -math.inf]])
    scaler.step(optimizer)


def test_steps_are_counted() -> None:
    weight, optimizer = make("SGD")
    scaler = scaler_of()
    seen = []
    for factor in (1.0, math.inf, math.nan, 1.0, 1.0, math.inf):
        iterate(scaler, optimizer, weight, factor)
        seen.append((scaler.stepped(optimizer), scaler.steps_taken(optimizer), scaler.skipped_in_a_row(optimizer)))
    assert seen == [(True, 1, 0), (False, 1, 1), (False, 1, 2), (True, 2, 0), (True, 3, 0), (False, 3, 1)]


@pytest.mark.parametrize("how", ["module", "mapping", "pairs", "optimizer", "none"])
def test_parameters_are_named(how: str) -> None:
    net = Net()
    optimizer = tp.optim.SGD(net.named_parameters() if how == "optimizer" else net.parameters(), lr=0.1)
    scaler = scaler_of()
    if how in ("module", "mapping", "pairs"):
        named = {"module": net, "mapping": dict(net.named_parameters()), "pairs": net.named_parameters()}
        scaler.name_parameters(named[how])
    overflow(scaler, net, optimizer)
    name = "param_groups[0]['params'][2]" if how == "none" else "head.weight"
    assert scaler.nonfinite(optimizer) == (NonFinite(name, nan=1, inf=2, numel=3, dtype="float32"),)
    assert str(scaler.nonfinite(optimizer)[0]) == f"{name}: 1 NaN, 2 Inf of 3 (float32)"


def test_they_are_still_known_after_zero_grad_and_update_and_gone_after_a_step() -> None:
    net = Net()
    optimizer = tp.optim.SGD(net.named_parameters(), lr=0.1)
    scaler = scaler_of()
    overflow(scaler, net, optimizer)
    optimizer.zero_grad()
    scaler.update()
    assert [one.name for one in scaler.nonfinite(optimizer)] == ["head.weight"]
    scaler.scale(net(tp.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    assert scaler.nonfinite(optimizer) == ()


def test_the_place_says_the_group() -> None:
    weight, other = tp.nn.Parameter(tp.ones(1)), tp.nn.Parameter(tp.ones(2))
    optimizer = tp.optim.SGD([{"params": [weight]}, {"params": [other]}], lr=0.1)
    scaler = scaler_of()
    scaler.scale((other * math.inf).sum()).backward()
    scaler.step(optimizer)
    assert [one.name for one in scaler.nonfinite(optimizer)] == ["param_groups[1]['params'][0]"]


@pytest.mark.parametrize("wrong", [3, ["weight"], [(1, 2)], {"a": 1}], ids=repr)
def test_names_are_pairs_of_name_and_parameter(wrong: Any) -> None:
    with pytest.raises(ScalingError, match=r"takes a module, a mapping, or pairs .* in it"):
        scaler_of().name_parameters(wrong)


@pytest.mark.parametrize("asked", ["stepped", "nonfinite"])
def test_an_optimizer_that_was_never_stepped_has_no_answer(asked: str) -> None:
    _, optimizer = make("SGD")
    with pytest.raises(
        ScalerProtocolError, match=rf"{asked}\(\) was asked of a SGD that .* not stepped. Call step\(\) first"
    ):
        getattr(scaler_of(), asked)(optimizer)


def test_the_scaler_keeps_neither_optimizers_nor_parameters() -> None:
    weight, optimizer = make("SGD")
    scaler = scaler_of()
    scaler.name_parameters({"weight": weight})
    iterate(scaler, optimizer, weight, math.inf)
    gone = [weakref.ref(weight), weakref.ref(optimizer)]
    del weight, optimizer
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_no_gradient_is_kept_after_update() -> None:
    weight, optimizer = make("SGD")
    scaler = scaler_of()
    iterate(scaler, optimizer, weight)
    assert (scaler._unscaled, scaler._turns) == ({}, {})


# NaN that stays


def test_a_nan_that_stays_is_told_once_and_by_name(caplog: pytest.LogCaptureFixture) -> None:
    weight = tp.nn.Parameter(tp.ones(2))
    optimizer = tp.optim.SGD([("head.weight", weight)], lr=0.1)
    scaler = scaler_of(max_nan_backoffs=2)
    scales = []
    with caplog.at_level(logging.WARNING, "mezzo.tensorplay.scaler"):
        for _ in range(5):
            iterate(scaler, optimizer, weight, math.nan)
            scales.append(scaler.get_scale())
    assert scales == [2.0**15, 2.0**14, 2.0**14, 2.0**14, 2.0**14]
    [record] = caplog.records
    assert "Gradients have been NaN, with no Inf among them, and 2 backoff(s)" in record.getMessage()
    assert "It stays at 16384. Parameters: head.weight: 2 NaN, 0 Inf of 2 (float32)." in record.getMessage()


def test_it_is_told_again_of_another_run_of_nan(caplog: pytest.LogCaptureFixture) -> None:
    weight, optimizer = make("SGD")
    scaler = scaler_of(max_nan_backoffs=0)
    for factor in (math.nan, math.nan, 1.0, math.nan):
        iterate(scaler, optimizer, weight, factor)
    assert len(caplog.records) == 2


def test_many_parameters_are_named_in_part(caplog: pytest.LogCaptureFixture) -> None:
    weights = [(f"layer{at}", tp.nn.Parameter(tp.ones(1))) for at in range(7)]
    optimizer = tp.optim.SGD(weights, lr=0.1)
    scaler = scaler_of(max_nan_backoffs=0)
    scaler.scale(sum((one * math.nan).sum() for _, one in weights)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert "layer4: 1 NaN, 0 Inf of 1 (float32); and 2 more." in caplog.text


def test_without_a_limit_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    weight, optimizer = make("SGD")
    scaler = scaler_of(max_nan_backoffs=None)
    for _ in range(12):
        iterate(scaler, optimizer, weight, math.nan)
    assert scaler.get_scale() == 2.0**4
    assert caplog.records == []
