"""What it costs to watch: a training step, or a scaler's step, with one of mezzo's tools on it and without.

Both sides are mezzo. They take turns in one process and share the model, so nothing but the tool differs. What a tool
leaves behind in a process can be seen only from another process, which never used one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.calls import LOW
from benchmarks.models import blocks, encoder
from benchmarks.steps import INTERVAL, SCALE, steps_with
from benchmarks.work import Work, describe

if TYPE_CHECKING:
    from benchmarks.cases import Case
    from benchmarks.pairing import Side

Watch = Callable[[nn.Module], AbstractContextManager[Any]]

_MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "blocks": blocks,
    "encoder-1x32": lambda: encoder(1, 32),
    "encoder-4x128": lambda: encoder(4, 128),
}


def watched_work(case: Case, side: Side) -> Work:
    """Prepare the work of one side: with the tool if it is mezzo's."""
    tool, _, subject = case.subject.partition("-")
    if tool in SCALERS:
        return SCALERS[tool](subject) if side == "mezzo" else steps_with(_scaler(), subject)
    model, inputs = _shared_model(subject)
    if tool == "before":
        if side == "mezzo":
            use_tools(model, inputs)
        return training_work(model, inputs)
    return training_work(model, inputs, WATCHES[tool] if side == "mezzo" else None)


@cache
def _shared_model(subject: str) -> tuple[nn.Module, Tensor]:
    return _MODELS[subject]()


# Training steps


def training_work(model: nn.Module, inputs: Tensor, watch: Watch | None = None) -> Work:
    """Prepare training steps; each in a new block of ``watch``, if there is one."""
    last: AbstractContextManager[Any] = nullcontext()

    def loop(count: int) -> None:
        nonlocal last
        for _ in repeat(None, count):
            model.zero_grad(set_to_none=True)
            last = nullcontext() if watch is None else watch(model)
            with last:
                _propagate(model, inputs)

    def probe() -> tuple[str, float]:
        loop(1)
        if watch is not None:
            check(last)
        return describe(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))

    return Work(loop, probe)


def _propagate(model: nn.Module, inputs: Tensor) -> None:
    from mezzo.torch import autocast

    with autocast("cpu", dtype=LOW, policy="default"):
        output = model(inputs)
    output.float().square().mean().backward()


def _explain(**options: bool) -> Watch:
    def watch(model: nn.Module) -> AbstractContextManager[Any]:
        from mezzo.torch import explain

        return explain(model=model, **options)

    return watch


def _find_nonfinite(model: nn.Module) -> AbstractContextManager[Any]:
    from mezzo.torch import find_nonfinite

    return find_nonfinite(model)


WATCHES: dict[str, Watch] = {
    "explain": _explain(),
    "numerics": _explain(numerics=True),
    "shadow": _explain(shadow=True),
    "find": _find_nonfinite,
}


def check(watched: Any) -> None:
    """Fail where a tool has not seen all of a step: less would be timed than the table says.

    Args:
        watched: The `explain` or `find_nonfinite` of a block that has ended.

    Raises:
        RuntimeError: It saw no op backward, or could not look at one; or something was not finite, and the search ended.
    """
    from mezzo.torch import find_nonfinite

    report = watched.report
    if isinstance(watched, find_nonfinite):
        complete = report.first is None and report.ops > 0
    else:
        complete = {"forward", "backward"} <= {record.phase for record in report.records}
    if not complete or any("could not be looked at" in note or "have no record" in note for note in report.notes):
        message = f"the step was not watched to its end:\n{report}"
        raise RuntimeError(message)


def use_tools(model: nn.Module, inputs: Tensor) -> None:
    """Use every tool once on a training step, and drop it."""
    for watch in WATCHES.values():
        training_work(model, inputs, watch).probe()


# Steps of a scaler


def _scaler(**options: Any) -> Any:
    from mezzo.torch import GradScaler

    return GradScaler("cpu", init_scale=SCALE, growth_interval=INTERVAL, **options)


def _explaining(subject: str) -> Work:
    return steps_with(_scaler(on_overflow="explain"), subject)


def _with_history(subject: str) -> Work:
    from mezzo.torch import ScaleHistory

    scaler = _scaler()
    history = ScaleHistory(scaler)
    work = steps_with(scaler, subject)

    def probe() -> tuple[str, float]:
        known = len(history.rows())
        result = work.probe()
        new = len(history.rows()) - known
        if new != 1:
            message = f"ScaleHistory took down {new} rows in one iteration."
            raise RuntimeError(message)
        return result

    return work._replace(probe=probe)


SCALERS: dict[str, Callable[[str], Work]] = {"overflow": _explaining, "history": _with_history}
