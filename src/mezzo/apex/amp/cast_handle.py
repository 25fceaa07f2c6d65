"""What starting O1 gives back: the handle of Apex's first version, which scripts and tests still use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor

from mezzo.apex.amp.cast_regions import end
from mezzo.apex.amp.cast_state import Started, started
from mezzo.apex.amp.cast_switches import casts_active
from mezzo.apex.amp.registered import put_back_registrations
from mezzo.apex.amp.watched_models import forget_weight_casts
from mezzo.errors import AmpError

__all__ = ["Handle", "NoHandle", "WrappedOptimizer"]

_OLD_SCALE_LOSS = (
    "handle.scale_loss() is from Apex's first version and has no optimizer to look at. Call "
    "amp.scale_loss(loss, optimizer) after amp.initialize(model, optimizer)."
)


class Handle:
    """O1 as it was started.

    Example:
        >>> from mezzo.apex import amp
        >>> handle = amp.init()
        >>> handle.is_active()
        True
        >>> handle._deactivate()
        >>> handle.is_active()
        False
    """

    def __init__(self, of: Started | None) -> None:
        self._started = of

    def is_active(self) -> bool:
        """Say whether this O1 is on, and not disabled in this thread."""
        return self._started is not None and started() is self._started and casts_active()

    def _deactivate(self) -> None:
        """End it, and put back the functions that were wrapped in place; twice is as good as once."""
        if self._started is not None and started() is self._started:
            end()
            put_back_registrations()

    def _clear_cache(self) -> None:
        """Drop the casts of weights."""
        forget_weight_casts()

    def scale_loss(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Raise, as Apex does: the old API is gone.

        Raises:
            AmpError: Always.
        """
        raise AmpError(_OLD_SCALE_LOSS)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> WrappedOptimizer:
        """Give an optimizer with a ``scale_loss`` of its own.

        Args:
            optimizer: The optimizer, which was given to ``amp.initialize``.
            num_loss: How many losses are scaled before each step.
        """
        return WrappedOptimizer(optimizer, self, num_loss)


class NoHandle(Handle):
    """The handle of ``init(enabled=False)``: nothing is cast, and nothing is scaled."""

    def __init__(self) -> None:
        super().__init__(None)

    @contextmanager
    def scale_loss(self, loss: Tensor, *_args: object, **_kwargs: object) -> Iterator[Tensor]:  # type: ignore[override]
        """Yield the loss as it came."""
        yield loss


class WrappedOptimizer:
    """An optimizer with a ``scale_loss`` of its own; all else is the optimizer's.

    Args:
        optimizer: The optimizer.
        handle: Of O1.
        num_loss: How many losses are scaled before each step; the first is scaled by the first scaler, and so on.
    """

    def __init__(self, optimizer: Any, handle: Handle, num_loss: int) -> None:
        self._optimizer, self._handle, self._num_loss = optimizer, handle, num_loss
        self._next = 0

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Scale a loss for its backward pass, as ``amp.scale_loss(loss, optimizer)`` does.

        Args:
            loss: The loss.

        Yields:
            The scaled loss; the loss itself if O1 is not on.

        Raises:
            AmpError: There are more losses before a step than ``num_loss``.
        """
        if not self._handle.is_active():
            yield loss
            return
        if self._next >= self._num_loss:
            msg = (
                f"this is loss {self._next + 1} since the last step, and the optimizer was wrapped for {self._num_loss}; "
                "call wrap_optimizer(optimizer, num_loss=...) with the number of losses, and step()."
            )
            raise AmpError(msg)
        from mezzo.apex import amp  # noqa: PLC0415 - it imports this module

        with amp.scale_loss(loss, self._optimizer, loss_id=self._next) as scaled:
            yield scaled
        self._next += 1

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step; the next loss is the first one again."""
        self._next = 0
        return self._optimizer.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return f"WrappedOptimizer({self._optimizer!r})"
