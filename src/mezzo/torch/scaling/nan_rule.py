"""When a NaN is no overflow, so that a smaller scale would not help.

An overflow shows as Inf, or, where float16 sums or products met an Inf on the way, as NaN alone. A run that starts with a
scale that is far too large can have NaN and nothing else for many backoffs, and be healthy in the end. So the scale stays
after so many backoffs for NaN alone only if one of these holds:

* the run has made a step before;
* the loss itself is not finite: that was so before it was scaled;
* no float16 is on the way from the loss to the gradients: nothing there overflows at any scale of use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .health import Health
from .nonfinite import Overflow

__all__ = ["NanRule"]

_log = logging.getLogger("mezzo.torch.scaler")
_NARROW = {torch.float16, torch.float8_e4m3fn, torch.float8_e5m2}
_MOST_NODES = 100_000


class NanRule:
    """Says where the scale is not to fall.

    Args:
        limit: After so many backoffs in a row for NaN alone. None: never.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._warned = False
        # Float32: where it is not 0, the scale cannot be to blame for NaN in this iteration.
        self._blameless: Tensor | None = None

    def matters(self, health: Health) -> bool:
        """Say whether so many iterations have failed in a row that the next loss is to be looked at."""
        return self.limit is not None and not health.settled and health.skips >= self.limit

    def look_at(self, scaled: Tensor) -> None:
        """Look whether gradients of a scaled loss can overflow at all; no host read."""
        if _may_overflow(scaled):
            blameless = (~scaled.detach().isfinite()).any().float()
        else:
            blameless = torch.ones((), device=scaled.device)
        if self._blameless is not None:
            blameless = torch.maximum(blameless, self._blameless.to(blameless.device, non_blocking=True))
        self._blameless = blameless

    def end_iteration(self, *, failed: bool | None) -> None:
        """Forget the losses; and if the iteration was finite, what was said of the run."""
        self._blameless = None
        if failed is False:
            self._warned = False

    def hold(
        self,
        health: Health,
        *,
        known: bool | None,
        found: Tensor,
        flags: Tensor | None,
        agree_: Callable[[Tensor], None],
        overflows: Callable[[], Iterable[Overflow]],
    ) -> Tensor | None:
        """Say where the scale is not to fall in this iteration.

        Args:
            health: With this iteration, if the host knows how it went.
            known: Whether it failed; None if the host does not know.
            found: The same on the device.
            flags: Any NaN, any Inf, whether neither is known; on the device, if anybody looked.
            agree_: Brings a flag to its maximum over all ranks.
            overflows: Gives what is known of the steps that were skipped, for the warning.

        Returns:
            Float32, of no dimension, not 0 where the scale is to stay; None if nowhere.
        """
        if self.limit is None or known is False or health.skips + (known is None) <= self.limit:
            return None
        if health.nan_backoffs() + (known is None) <= self.limit:
            return None
        stays = torch.ones_like(found)
        if not health.settled:
            stays = torch.zeros_like(found) if self._blameless is None else self._blameless.to(found.device)
            agree_(stays)
        if not self._warned:
            self._warned = True
            _warn(health.skips, overflows(), stays=bool(stays))
        if known:
            return found * stays
        return None if flags is None else flags[0] * (1 - flags[1]) * (1 - flags[2]) * stays


def _warn(skips: int, overflows: Iterable[Overflow], *, stays: bool) -> None:
    named = "; ".join(overflow.describe() for overflow in overflows) or "not known"
    what = (
        "This is no overflow, and a smaller scale does not help: it stays as it is."
        if stays
        else "The scale falls on, down to min_scale, since no step was made yet and float16 gradients of the finite loss "
        "may still overflow."
    )
    _log.warning(
        "Gradients have been NaN, with no Inf among them, for %d iteration(s) in a row. %s Parameters: %s. If it lasts, "
        "look for a division by zero, a logarithm or root of a number that is not positive, or NaN in the data.",
        skips,
        what,
        named,
    )


def _may_overflow(loss: Tensor) -> bool:
    """Say whether a loss's backward pass has anything in float16, as far as one can see.

    It cannot be seen in code that is compiled, or in autograd functions written in Python; there the answer is yes.
    """
    start = loss.grad_fn
    if loss.dtype in _NARROW or start is None:
        return loss.dtype in _NARROW
    seen, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction) or len(seen) > _MOST_NODES:
            return True
        if any(each.dtype in _NARROW for each in node._input_metadata):
            return True
        following = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= following
        waiting += following
    return False
