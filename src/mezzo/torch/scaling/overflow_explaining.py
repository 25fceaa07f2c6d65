"""What ``GradScaler(on_overflow="explain")`` does: after a skipped step it watches the next iteration, and tells of it.

The backward pass that overflowed is over when a scaler learns of it. An overflow that has a cause comes again, since the
scale falls by a half only; one that does not come again needs no explanation. So nothing is watched while all goes well.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

import torch

from mezzo.report.nonfinite import NonFiniteReport
from mezzo.torch.searching.find_nonfinite import find_nonfinite

if TYPE_CHECKING:
    from .nonfinite import Overflow

__all__ = ["OverflowExplainer"]

_log = logging.getLogger("mezzo.torch.scaler")


class OverflowExplainer:
    """Explains the overflows of one scaler, in the thread that uses it.

    Attributes:
        explanation: The last report that named an op; None before.
    """

    def __init__(self) -> None:
        self.explanation: NonFiniteReport | None = None
        self._told: object = None
        self._wanted = False
        self._watch: find_nonfinite | None = None
        self._ended: find_nonfinite | None = None

    def __call__(self, overflow: Overflow) -> None:
        """Hear that a step was skipped."""
        ended, self._ended = self._ended, None
        if ended is None or ended.first is None:
            self._wanted = True  # not watched, or not seen: a parameter's gradient was written by hand, say
            return
        self._wanted = False
        self.explanation = ended.report
        first = ended.first
        what = first.op, first.path, first.phase, first.kind, first.source
        if what == self._told:  # once is enough, however often it comes again
            return
        self._told = what
        told = "a step was skipped at scale %g, number %d in a row.\n%s\ngradients: %s"
        _log.warning(told, overflow.scale, overflow.skipped_in_a_row, first, overflow.describe())

    def iteration_begins(self) -> None:
        """Begin to watch if the last step was skipped; after `update`."""
        self._close()
        self._ended = None
        # The mode of somebody else's block would be taken off in the place of this one.
        if self._wanted and self._watch is None and not torch._C._len_torch_dispatch_stack():
            self._wanted = False
            self._watch = find_nonfinite()
            self._watch.__enter__()
            # A loop may end after a skipped step; what is open then ends with its scaler.
            self._finalizer = weakref.finalize(self, self._watch.__exit__, None, None, None)

    def step_begins(self) -> None:
        """Stop watching; the backward pass is over."""
        if self._watch is not None:
            self._watch.pause()
            self._ended = self._watch
            self._close()

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None
            self._finalizer.detach()

    def __reduce__(self) -> tuple[type[OverflowExplainer], tuple[()]]:
        return type(self), ()

    def __repr__(self) -> str:
        return "'explain'"
