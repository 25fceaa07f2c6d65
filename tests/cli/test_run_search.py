"""What ``mezzo run --find-nonfinite`` tells: what lasts, and not what a gradient scaler has answered."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Hashable
from collections.abc import Set as AbstractSet
from typing import Any

import pytest
import torch

import mezzo.torch
from mezzo.cli.run_plan import RunPlan
from mezzo.cli.run_rounds import Rounds
from mezzo.cli.run_watch import Watch
from mezzo.report import SourceLine
from mezzo.report.nonfinite import NonFiniteReport

from .test_run_watch import TARGET, Loop, open_modes

Scaler = Callable[..., Any]
SCALERS = [torch.amp.GradScaler, mezzo.torch.GradScaler]

OVERCOME = (
    "{} not finite, and the training went on with finite gradients, as it does when a gradient scaler finds its scale; "
    "first Inf in _to_copy at {}"
)


def line_of(what: Any, text: str) -> SourceLine:
    """Say where a text is in the source of a function or class."""
    lines, first = inspect.getsourcelines(what)
    number = next(number for number, line in enumerate(lines, first) if text in line)
    function = "backward" if inspect.isclass(what) else what.__name__
    return SourceLine(__file__, number, function)


def one_step(
    loop: Loop, scaler: torch.amp.GradScaler, x: float = 1.0, *, factor: float = 1.0, zero: bool = True
) -> None:
    """Make an iteration in float16."""
    loop.optimizers[0].zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = loop.net(torch.full((1, 2), x))
    out = out if factor else Zero.apply(out, factor)  # type: ignore[no-untyped-call]
    loss = out.float().sum()
    scaler.scale(loss).backward()
    scaler.step(loop.optimizers[0])
    scaler.update()


def train(
    watch: Watch,
    loop: Loop,
    *,
    inputs: list[float],
    scale: float,
    kind: Scaler = torch.amp.GradScaler,
    factors: list[float] | None = None,
) -> list[float]:
    """Train in float16 with a scaler, one step for each input; give the scales after them."""
    scaler = kind("cpu", init_scale=scale)
    scales = []
    watch.start()
    for value, factor in zip(inputs, factors or [1.0] * len(inputs), strict=True):
        one_step(loop, scaler, value, factor=factor)
        scales.append(scaler.get_scale())
    watch.close()
    return scales


def test_an_overflow_that_the_scaler_overcomes_is_a_note_and_the_search_goes_on() -> None:
    watch = Watch(RunPlan(TARGET, find_nonfinite=True))
    scales = train(watch, Loop(), inputs=[1.0, 1.0, 1.0, 1.0, 1e6], scale=2.0**17)
    assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**14], "two overflows, two steps, and the planted one"
    assert watch.nonfinite is not None
    assert watch.nonfinite.first is not None
    assert watch.nonfinite.first.phase == "forward"
    assert watch.nonfinite.notes == (OVERCOME.format("2 backward passes were", line_of(one_step, "out.float().sum()")),)


def test_what_was_overcome_is_a_note_in_one_line_if_there_is_nothing_else() -> None:
    watch = Watch(RunPlan(TARGET, find_nonfinite=True))
    train(watch, Loop(), inputs=[1.0, 1.0, 1.0], scale=2.0**16)
    assert watch.nonfinite is not None
    assert (watch.nonfinite.first, watch.nonfinite.parameters) == (None, ())
    lines = str(watch.nonfinite).splitlines()
    assert lines[0] == f"{watch.nonfinite.ops} ops, and nothing lasting that is not finite"
    assert lines[1:] == ["note: " + OVERCOME.format("a backward pass was", line_of(one_step, "out.float().sum()"))]


class Zero(torch.autograd.Function):
    """Multiplies and divides by a factor in the backward pass: NaN if it is 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor / torch.tensor(ctx.factor), None


@pytest.mark.parametrize("kind", SCALERS)
def test_what_repeats_to_the_end_is_told_and_not_an_overflow_before_it(kind: Scaler) -> None:
    watch = Watch(RunPlan(TARGET, find_nonfinite=True))
    train(watch, Loop(), inputs=[1.0] * 6, scale=2.0**16, kind=kind, factors=[1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    found = watch.nonfinite
    assert found is not None
    assert found.first is not None
    assert (found.first.kind, found.first.op, found.first.source) == ("NaN", "aten::div", line_of(Zero, "grads[0]"))
    assert [text.split(":")[0] for text in found.parameters] == ["weight", "bias"]
    assert found.notes[0].startswith("a backward pass was not finite, and the training went on")
    assert found.notes[1:] == ("3 backward passes were not finite; no step with finite gradients came after them",)


def test_as_the_scale_falls_what_stays_is_told() -> None:
    watch = Watch(RunPlan(TARGET, find_nonfinite=True))
    train(watch, Loop(), inputs=[1.0] * 4, scale=2.0**17, factors=[0.0] * 4)
    found = watch.nonfinite
    assert found is not None
    assert found.first is not None
    assert (found.first.kind, found.first.op) == ("NaN", "aten::div")
    assert found.notes == (
        "4 backward passes were not finite, of which 2 began with this op; no step with finite gradients came after them",
    )


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["broken first", "broken last"])
@pytest.mark.parametrize("breaks", [False, True])
def test_each_of_several_optimizers_has_to_recover_for_itself(
    *, kind: Scaler, order: tuple[int, int], breaks: bool
) -> None:
    watch, loops = Watch(RunPlan(TARGET, find_nonfinite=True)), (Loop(), Loop())
    scalers = [kind("cpu", init_scale=2.0**16) for _ in loops]
    watch.start()
    for _ in range(5):
        for one in order:
            one_step(loops[one], scalers[one], factor=0.0 if breaks and one == 0 else 1.0)
    watch.close()
    found = watch.nonfinite
    assert found is not None
    if breaks:
        assert found.first is not None
        assert (found.first.kind, found.first.op) == ("NaN", "aten::div")
        assert len(found.parameters) == 2
        assert found.notes[1].startswith("5 backward passes were not finite, of which 4 began with this op")
    else:
        assert (found.first, found.parameters) == (None, ())
        assert found.notes[0].startswith("2 backward passes were not finite, and the training went on")


def test_a_gradient_is_not_taken_for_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    class Told(Rounds):
        def add(self, report: NonFiniteReport, parameters: AbstractSet[Hashable]) -> None:
            told.append(len(report.parameters))
            super().add(report, parameters)

    monkeypatch.setattr("mezzo.cli.run_search.Rounds", Told)
    watch, loop = Watch(RunPlan(TARGET, find_nonfinite=True)), Loop()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    watch.start()
    # Python gives the address of an object that is gone to another soon; to collect garbage makes that often enough.
    for _ in range(60):
        one_step(loop, scaler, factor=0.0)
        gc.collect(0)
    watch.close()
    assert told == [2] * 60


@pytest.mark.parametrize("kind", SCALERS)
def test_a_fused_step_that_is_skipped_on_the_device_has_not_been_reached(kind: Scaler) -> None:
    watch, loop = Watch(RunPlan(TARGET, find_nonfinite=True)), Loop()
    loop.optimizers = [torch.optim.SGD(loop.net.parameters(), lr=0.1, fused=True)]
    train(watch, loop, inputs=[1.0] * 3, scale=2.0**16, kind=kind)
    assert watch.nonfinite is not None
    assert watch.nonfinite.first is None
    assert watch.nonfinite.notes[0].startswith("a backward pass was not finite, and the training went on")


def test_gradients_that_are_left_from_a_skipped_step_are_no_finding() -> None:
    watch, loop = Watch(RunPlan(TARGET, find_nonfinite=True)), Loop()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    watch.start()
    one_step(loop, scaler)
    assert loop.net.bias.grad is not None
    assert not (2 * loop.net.bias.grad.norm()).isfinite()
    one_step(loop, scaler)
    watch.close()
    assert watch.nonfinite is not None
    assert watch.nonfinite.first is None


def test_what_reaches_a_step_ends_the_search_and_names_the_parameters() -> None:
    watch, loop = Watch(RunPlan(TARGET, find_nonfinite=True)), Loop()
    watch.start()
    loop.step()
    assert open_modes() == 1
    loop.optimizers[0].zero_grad()
    (loop.net(torch.zeros(1, 2)).sum() * 0).log().backward()
    loop.optimizers[0].step()
    assert open_modes() == 0
    watch.close()
    assert watch.nonfinite is not None
    assert watch.nonfinite.first is not None
    assert watch.nonfinite.first.op == "aten::log"
    assert [text.split(":")[0] for text in watch.nonfinite.parameters] == ["weight", "bias"]
    assert not [note for note in watch.nonfinite.notes if "the training went on" in note]


def test_what_a_forward_pass_makes_is_the_finding_though_its_gradients_are_finite() -> None:
    watch, loop = Watch(RunPlan(TARGET, find_nonfinite=True)), Loop()
    watch.start()
    loop.net(torch.ones(1, 2)).relu().mul(0).add(torch.zeros(1, 2).log()).sum().backward()
    loop.optimizers[0].step()
    loop.net(torch.full((1, 2), 1e38)).mul(1e38).sum().backward()
    loop.optimizers[0].step()
    watch.close()
    assert watch.nonfinite is not None
    assert watch.nonfinite.first is not None
    assert (watch.nonfinite.first.op, watch.nonfinite.parameters, watch.nonfinite.notes) == ("aten::log", (), ())
