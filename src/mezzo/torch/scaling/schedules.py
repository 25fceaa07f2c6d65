"""Learning-rate schedules that only advance when the optimizer has stepped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mezzo.torch.scaler import GradScaler

__all__ = ["SteppedScheduler"]

_OWN = frozenset({"_scheduler", "_scaler", "_seen"})


class SteppedScheduler:
    """A scheduler that stands still while a scaler skips steps.

    A scheduler of PyTorch's counts its own calls: with a scaler that skips the first steps while the scale is found, it runs
    ahead of the optimizer, and warns that it was called before it. This one advances the scheduler it wraps only if the
    optimizer was really stepped since its own last call. So it may be called after each step, or once per epoch. In all
    else it is the scheduler it wraps: what one reads, sets and calls passes through, ``state_dict`` and ``load_state_dict``
    too, so checkpoints fit both.

    Wrap the outermost scheduler: `SequentialLR` and `ChainedScheduler` as a whole, and not what they are made of. With
    an optimizer that decides on the device whether it steps, ``step`` waits for the device.

    Made for one thread, as schedulers are.

    Args:
        scheduler: A scheduler of `torch.optim.lr_scheduler`, or an object that has an ``optimizer`` and a ``step`` method.
        scaler: The scaler that makes the optimizer's steps. A disabled one makes all, so each call advances.

    Raises:
        TypeError: One of them is something else.

    Example:
        >>> import torch
        >>> from mezzo.torch import GradScaler
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> scaler = GradScaler("cpu")
        >>> scheduler = SteppedScheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5), scaler)
        >>> for factor in (float("inf"), 1.0):
        ...     optimizer.zero_grad()
        ...     scaler.scale((weight * factor).sum()).backward()
        ...     _ = scaler.step(optimizer)
        ...     scaler.update()
        ...     scheduler.step()
        ...     print(scheduler.get_last_lr())
        [1.0]
        [0.5]
    """

    _scheduler: Any
    _scaler: GradScaler
    _seen: int

    def __init__(self, scheduler: Any, scaler: GradScaler) -> None:
        """Take the scheduler and the scaler; steps that were made before do not count."""
        if isinstance(scheduler, type) or not _is_scheduler(scheduler):
            msg = (
                f"SteppedScheduler got {_kind(scheduler)} as the scheduler; it takes one of torch.optim.lr_scheduler, or an "
                "object with an `optimizer` and a `step` method. Make the scheduler first, then wrap it: "
                "SteppedScheduler(LambdaLR(optimizer, f), scaler)."
            )
            raise TypeError(msg)
        if isinstance(scaler, type) or not callable(getattr(scaler, "steps_taken", None)):
            msg = (
                f"SteppedScheduler got {_kind(scaler)} as the scaler; it takes a mezzo.torch.GradScaler, which counts "
                "the steps that were really made. Make the scaler with that class; all other calls to it stay as they are."
            )
            raise TypeError(msg)
        object.__setattr__(self, "_scheduler", scheduler)
        object.__setattr__(self, "_scaler", scaler)
        object.__setattr__(self, "_seen", self._taken())

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the scheduler, if the optimizer was stepped since the last call.

        Args:
            *args: For the ``step`` of the wrapped scheduler, such as the metrics of `ReduceLROnPlateau`.
            **kwargs: As ``args``.
        """
        if self._scaler.is_enabled():
            taken = self._taken()
            # The count starts anew in a copy of the scaler.
            before = self._seen if self._seen <= taken else 0
            self._seen = taken
            if taken == before:
                return
        self._scheduler.step(*args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped scheduler; steps that were made before do not count.

        Args:
            state_dict: What ``state_dict`` gave, of this object or of a scheduler that is not wrapped.
        """
        self._scheduler.load_state_dict(state_dict)
        self._seen = self._taken()

    def _taken(self) -> int:
        return self._scaler.steps_taken(self._scheduler.optimizer) if self._scaler.is_enabled() else 0

    def __getattr__(self, name: str) -> Any:
        """Give an attribute of the wrapped scheduler."""
        # While it is copied or unpickled there is none yet.
        if name in _OWN or (name.startswith("__") and name.endswith("__")):
            msg = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(msg)
        return getattr(self._scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapped scheduler."""
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._scheduler, name, value)

    def __repr__(self) -> str:
        """Name what is wrapped."""
        return f"SteppedScheduler({self._scheduler!r})"


def _is_scheduler(given: object) -> bool:
    return callable(getattr(given, "step", None)) and hasattr(given, "optimizer")


def _kind(given: object) -> str:
    if isinstance(given, type):
        return f"the class {given.__qualname__}"
    if isinstance(given, torch.optim.Optimizer | torch.amp.GradScaler):
        return f"a {type(given).__module__.rpartition('.')[0]}.{type(given).__qualname__}"
    return f"{given!r:.60} of type {type(given).__qualname__}"
