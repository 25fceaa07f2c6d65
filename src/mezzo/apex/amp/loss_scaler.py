"""The scale of a loss: Apex's object, whose attributes scripts set and read, over `mezzo.LossScaling`'s rule.

The scale is a number on the host, as in Apex: after each ``scale_loss`` block one verdict is read from the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import AmpOptionError, ScalingError
from mezzo.scaling import LossScaling, ScaleState, Verdict

__all__ = ["LossScaler"]

_FLOOR = 2.0**-24
"""Where a scale stops falling if the user names no floor. Apex's fell to 0 and divided by it."""


class LossScaler:
    """The scale of one loss, dynamic or static.

    Dynamic: halved after a block whose gradients were not finite, doubled after ``scale_window`` finite blocks in a row.
    Static: it stays; steps with gradients that are not finite are skipped all the same.

    Args:
        loss_scale: ``"dynamic"``, or a number, also as a string.
        init_scale: The first dynamic scale, if ``max_loss_scale`` is not lower.
        scale_factor: What a dynamic scale is multiplied and divided by.
        scale_window: After so many finite blocks in a row it grows.
        min_loss_scale: It does not fall below this; None or 0 for 2**-24.
        max_loss_scale: It does not grow beyond this; None for no limit.

    Raises:
        AmpOptionError: A number is not allowed.

    Not to be used by two threads at once.

    Example:
        >>> from mezzo.apex import amp
        >>> scaler = LossScaler("dynamic")
        >>> scaler.loss_scale()
        65536.0
        >>> scaler._has_overflow = True
        >>> scaler.update_scale(), scaler.loss_scale()
        (True, 32768.0)
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._min_loss_scale = min_loss_scale
        self._max_loss_scale = max_loss_scale
        self._scale_factor = scale_factor
        self._scale_seq_len = scale_window
        self._unskipped = 0
        self._has_overflow = False
        self._overflow_buf: Tensor = torch.zeros(())
        self._nan_alone = 0
        self._stuck = False
        self._was_finite = False
        self._told = False
        if not self.dynamic:
            self._loss_scale = _checked("loss_scale", loss_scale)
            return
        start = init_scale if max_loss_scale is None else min(init_scale, max_loss_scale)
        self._loss_scale = _checked("loss_scale", start)
        self._rule()

    def loss_scale(self) -> float:
        """Give the scale."""
        return self._loss_scale

    def clear_overflow_state(self) -> None:
        """Forget what the last look at gradients found."""
        self._has_overflow = False
        self._overflow_buf = torch.zeros_like(self._overflow_buf)

    def update_scale(self) -> bool:
        """Move the scale by what the last look at gradients found. Reads ``_overflow_buf`` from the device.

        Returns:
            Whether the step is to be skipped.
        """
        if not self._has_overflow:
            self._has_overflow = bool(self._overflow_buf.item())
        self.take(Verdict.INF if self._has_overflow else Verdict.FINITE)
        return self._has_overflow

    def take(self, verdict: Verdict) -> None:
        """Move the scale by a verdict.

        Args:
            verdict: What the gradients of a block were.
        """
        self._has_overflow = verdict is not Verdict.FINITE
        self._was_finite = self._was_finite or not self._has_overflow
        if not self.dynamic:
            self._unskipped = 0 if self._has_overflow else self._unskipped + 1
            return
        before = ScaleState(self._loss_scale, self._unskipped)
        after = self._rule().next(before, verdict)
        self._stuck = self._has_overflow and after.scale == before.scale
        self._loss_scale, self._unskipped = after.scale, after.growth_tracker

    def tell(self, verdict: Verdict, describe: Callable[[], str]) -> None:
        """Warn, once, when it is not the scale that makes gradients overflow: at the floor, or for a NaN that lasts.

        Args:
            verdict: What the gradients of a block were.
            describe: Names the parameters.

        Warns:
            RuntimeWarning: With what was found where.
        """
        self._nan_alone = self._nan_alone + 1 if verdict is Verdict.NAN else 0
        # A first scale that is far too large gives NaN alone too, and a smaller one helps.
        is_lasting = self._nan_alone >= 8 and (self._was_finite or not self.dynamic or self._loss_scale < 1.0)
        if self._told or not (self._stuck or is_lasting):
            return
        self._told = True
        what = "are NaN, and nowhere Inf, for the eighth time in a row"
        if self._stuck:
            what = f"overflow at the scale {self._loss_scale:g}, below which it does not go"
        msg = f"Gradients {what}. Look for a fault of the model or the data at: {describe()}."
        warnings.warn(msg, RuntimeWarning, stacklevel=2)

    def _rule(self) -> LossScaling:
        return _rule(self._scale_factor, self._scale_seq_len, self._min_loss_scale or _FLOOR, self._max_loss_scale)

    def __repr__(self) -> str:
        kind = "dynamic" if self.dynamic else "static"
        return f"<LossScaler: {kind}, scale {self._loss_scale:g}, unskipped {self._unskipped}>"


@lru_cache(maxsize=32)
def _rule(factor: float, interval: int, floor: float, ceiling: float | None) -> LossScaling:
    try:
        return LossScaling(
            growth_factor=factor,
            backoff_factor=1.0 / factor,
            growth_interval=interval,
            min_scale=floor,
            max_scale=ceiling,
            max_nan_backoffs=None,
        )
    except ScalingError as error:
        text = str(error).replace("min_scale", "min_loss_scale").replace("max_scale", "max_loss_scale")
        raise AmpOptionError(text) from None


def _checked(name: str, number: Any) -> float:
    try:
        return LossScaling(init_scale=float(number)).start().scale
    except (ScalingError, ValueError, TypeError) as error:
        msg = f"{name} is 'dynamic' or a positive number such as 128.0, got {number!r} ({error})."
        raise AmpOptionError(msg) from None
