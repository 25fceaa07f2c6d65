"""Steps: how a `GradScaler` calls an optimizer whose gradients are finite.

An optimizer that divides its gradients itself (``_step_supports_amp_scaling``, such as TensorPlay's fused SGD and Adagrad)
finds two attributes while it steps: ``grad_scale``, a tensor to divide by, or None if they are divided; and ``found_inf``,
a tensor, always 0 here, since a step that is skipped is not called. So its state stays as it is: SGD (1.0.0), called for a
first step that it is to skip, takes its momentum from memory that nobody has written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorplay
from tensorplay import Tensor

from mezzo.errors import ScalerProtocolError
from mezzo.scaling import Verdict

from .gradients import Gradients
from .iterations import SCALED, STEPPED, UNSCALED, Iterations, Turn

__all__ = ["ScalerSteps", "closure_in"]

_ABSENT: Any = object()


class ScalerSteps(Iterations):
    """A scaler's steps."""

    def _begin_step(self, optimizer: Any) -> Turn:
        turn = self._turn_of(optimizer)
        if turn.stage is STEPPED:
            msg = (
                "step() has already been called since the last update(). Call update() once per iteration, after all "
                "steps."
            )
            raise ScalerProtocolError(msg)
        if turn.stage is UNSCALED:
            self._refuse_late(turn)
        return turn

    def _step(self, turn: Turn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        optimizer = turn.optimizer
        if turn.stage is SCALED or turn.found is None:
            if _decides_itself(optimizer) and Gradients(optimizer).of_dtype(tensorplay.float16):
                # Dividing them in float16 would lose small ones; the optimizer does it in float32.
                self._look_only(turn)
            else:
                self._unscale(turn)
        if turn.found is None:
            self._without_gradients(turn)
            return None
        result = None
        if turn.found is Verdict.FINITE:
            with self._contract(turn):
                result = optimizer.step(*args, **kwargs)
        self._end_step(turn)
        return result

    def _end_step(self, turn: Turn) -> None:
        turn.stage = STEPPED
        steps = self._steps_of(turn.optimizer)
        steps.step(made=turn.found is Verdict.FINITE, nonfinite=turn.nonfinite)

    @contextlib.contextmanager
    def _contract(self, turn: Turn) -> Iterator[None]:
        """Set what an optimizer that divides itself looks for; what the user has set is there again afterwards."""
        optimizer = turn.optimizer
        if not _decides_itself(optimizer):
            yield
            return
        scale = self._begin("step")
        # By the optimizer's own ways: it may be a wrapper that passes attributes on.
        before = {name: getattr(optimizer, name, _ABSENT) for name in ("grad_scale", "found_inf")}
        divisor = preset = None if before["grad_scale"] is _ABSENT else before["grad_scale"]
        if turn.by_contract:
            divisor = scale if preset is None else scale * preset
        optimizer.grad_scale = divisor
        optimizer.found_inf = tensorplay.zeros((), device=scale.device)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is _ABSENT:
                    delattr(optimizer, name)
                else:
                    setattr(optimizer, name, value)


def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Find the closure among the arguments for an optimizer's ``step``: ``closure=``, or the first if it is a function."""
    given = kwargs.get("closure")
    if given is None and args and callable(args[0]) and not isinstance(args[0], Tensor):
        given = args[0]
    return given if callable(given) else None


def _decides_itself(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
