"""The search of ``mezzo run`` for what is not finite: it goes on when the script's training does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mezzo.nonfinite_report import NonFiniteReport

if TYPE_CHECKING:
    from mezzo.torch import find_nonfinite

__all__ = ["NonFiniteSearch"]


class NonFiniteSearch:
    """Looks for the op that broke the training, and not for one whose step a gradient scaler has skipped.

    A scaler begins with a scale that is too large on purpose, so the first overflow of a backward pass is seldom a fault.
    At a step of an optimizer after it was found, the gradients tell: if they are finite it was overcome, and the search
    begins anew. What a forward pass makes is never overcome. Used by one thread.

    Example:
        >>> search = NonFiniteSearch()
        >>> search.open()
        >>> search.close()
        >>> print(search.report)
        0 ops, all finite
    """

    def __init__(self) -> None:
        self._found: find_nonfinite | None = None
        self._overcome: list[NonFiniteReport] = []
        self._is_open = False

    def open(self) -> None:
        """Begin to look, as the innermost of all that watches the thread."""
        import mezzo.torch  # noqa: PLC0415 - PyTorch is there only now

        self._found = mezzo.torch.find_nonfinite()
        self._found.__enter__()
        self._is_open = True

    def after_step(self) -> None:
        """See whether what was found has reached a step of an optimizer. To be called as the innermost, as `open`."""
        if not self._is_open or self._found is None or self._found.first is None:
            return
        self.close()
        if self._found.first.phase == "backward" and not self._found.parameters:
            self._overcome.append(self._found.report)
            self.open()

    def close(self) -> None:
        """End. Called twice, it does nothing more."""
        if self._is_open and self._found is not None:
            self._is_open = False
            self._found.__exit__(None, None, None)

    @property
    def report(self) -> NonFiniteReport:
        """What was found; of what was overcome the first, if there was nothing else."""
        last = self._found.report if self._found is not None else NonFiniteReport(None, (), 0)
        if not self._overcome:
            return last
        first, times = self._overcome[0], len(self._overcome)
        report = replace(first if last.first is None else last, ops=last.ops + sum(one.ops for one in self._overcome))
        return replace(report, notes=(*report.notes, _overcome(first, times)))


def _overcome(first: NonFiniteReport, times: int) -> str:
    op = first.first
    where = "" if op is None else f"{op.op.removeprefix('aten::')} of {'/'.join(op.path) or 'no module'}"
    return (
        f"{'once' if times == 1 else f'{times} times'} the training went on with finite gradients after a backward pass was "
        f"not finite, as it does when a gradient scaler finds its scale; the first to overflow was {where}"
    )
