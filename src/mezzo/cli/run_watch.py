"""What ``mezzo run`` opens around a script once it has imported PyTorch: policy, `explain`, `find_nonfinite`, the lint."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from mezzo.errors import MezzoError
from mezzo.report import Region, Report
from mezzo.report.nonfinite import NonFiniteReport

from .run_plan import RunPlan

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from mezzo.torch.recording.explain import explain

    from .run_search import NonFiniteSearch
    from .script_lint import ScriptLint

__all__ = ["Watch"]

_ELSEWHERE = (
    "processes and threads that the script starts are not watched; to watch each process of a group, start the group by "
    "torchrun -m mezzo run SCRIPT"
)


class Watch:
    """Watches a script by a plan. `start` is called when the script has imported PyTorch, `close` when it has ended.

    Both are the main thread's. What other threads of the script compute is not seen.

    Attributes:
        started: Whether the script has imported PyTorch.
        report: What `explain` and the lint saw; None if neither looked, or not yet.
        nonfinite: What `find_nonfinite` saw; None if it did not look, or not yet.

    Example:
        >>> from mezzo.cli.script_runner import Target
        >>> watch = Watch(RunPlan(Target("train.py")))
        >>> watch.close()
        >>> watch.started
        False
    """

    def __init__(self, plan: RunPlan) -> None:
        self.started = False
        self.report: Report | None = None
        self.nonfinite: NonFiniteReport | None = None
        self._plan = plan
        self._title = plan.target.name if plan.target.module else Path(plan.target.name).name
        self._explained: explain | None = None
        self._lint: ScriptLint | None = None
        self._search: NonFiniteSearch | None = None
        self._notes: list[str] = []
        self._ended = ""
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._open = ExitStack()
        self._records = ExitStack()
        self._modes = 0
        self._closed = False
        self._thread = threading.get_ident()
        self._process = os.getpid()

    def start(self) -> None:
        """Set the policy and open what the plan asks for.

        Raises:
            SystemExit: The policy cannot be set with this PyTorch. The script does not run without what was asked for.
        """
        # Not `mezzo.torch.set_default_policy`: the import of that package may be the one that has led here.
        from mezzo.torch.policies import set_default_policy  # noqa: PLC0415 - PyTorch is there only now

        self.started = True
        try:
            if self._plan.policy is not None:
                set_default_policy(self._plan.policy)
        except MezzoError as error:
            sys.stderr.write(f"mezzo: {error}\n")
            raise SystemExit(2) from None
        if not self._plan.watches:
            return
        if threading.get_ident() != self._thread:
            self._notes.append("the script imported torch in a thread that is not its main one, so nothing was watched")
            return
        self._try("watching", self._open_all)

    def _open_all(self) -> None:
        from mezzo.torch.recording.explain import explain  # noqa: PLC0415 - as above

        plan = self._plan
        os.register_at_fork(after_in_child=self._leave_child)
        if plan.find_nonfinite:
            from .run_search import NonFiniteSearch  # noqa: PLC0415 - as above

            self._search = NonFiniteSearch()
            self._search.open()
            self._open.callback(self._search.close)
        if plan.explain:
            self._open.callback(self._end_of_records)
            self._explained = self._records.enter_context(explain(numerics=plan.numerics, shadow=plan.shadow))
        self._modes = _open_modes()
        if plan.lint:
            from .script_lint import ScriptLint  # noqa: PLC0415 - as above

            self._lint = ScriptLint()
        from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415 - as above

        self._open.callback(register_optimizer_step_post_hook(self._after_step).remove)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if threading.get_ident() != self._thread or os.getpid() != self._process:
            return
        # Counted for each optimizer, since some loops have several.
        made = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if made == 1 and self._lint is not None:
            self._try("lint", partial(self._lint.look_at, optimizer))
        # A mode that the script has opened since has to end first: they end in the order of a stack.
        innermost = _open_modes() == self._modes
        if innermost and self._explained is not None and self._plan.steps is not None and made >= self._plan.steps:
            self._end_of_records()
        if self._search is not None:
            may_close = innermost and self._explained is None
            self._try("find_nonfinite", partial(self._search.after_step, optimizer, may_close=may_close))
        if innermost:
            self._modes = _open_modes()

    def _end_of_records(self) -> None:
        self._try("explain", self._make_report)

    def _make_report(self) -> None:
        """Make the report while the script's models are alive: they have the names."""
        explained, self._explained = self._explained, None
        if explained is None:
            return
        self._records.close()
        report = explained.report
        regions = tuple(replace(one, name=self._title) if one.name == report.title else one for one in report.regions)
        notes = report.notes
        if not report.records:
            notes += (_ELSEWHERE,)
        if made := max(self._steps.values(), default=0):
            notes += (f"recorded to the end of step {made} of an optimizer",)
        self.report = replace(report, title=self._title, regions=regions, notes=notes)

    def close(self, error: BaseException | None = None) -> None:
        """End all that is open, and finish the report. Called twice, it does nothing more.

        Args:
            error: What the script has raised, if it did.
        """
        if not self.started or self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._ended = "" if error is None or isinstance(error, SystemExit) else type(error).__name__
        self._try("watching", self._open.close)
        if self._search is not None:
            self.nonfinite = self._search.report(self._ended)
        if self._ended and (self.report is not None or self._search is None):
            self._notes.append(f"the script ended with {self._ended}")
        regions: tuple[Region, ...] = ()
        if self._lint is not None:
            self._try("lint", partial(self._lint.finish, _file_of_main()))
            regions = (Region("lint", findings=self._lint.findings),) if self._lint.findings else ()
        empty = self.report is None and self._plan.lint and self._plan.report is not None
        if regions or self._notes or empty:  # who asked for a file gets one, also of a lint that has found nothing
            report = self.report or Report(self._title, "torch")
            notes = (*report.notes, *self._notes)
            self.report = replace(report, regions=(*report.regions, *regions), notes=notes)

    def _try(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the script must not fail because somebody looks on
            self._notes.append(f"{what} failed, which is a fault of mezzo: {type(error).__name__}: {error}")

    def _leave_child(self) -> None:
        """In a process that was forked, such as a DataLoader's worker, watch no more: nobody would read it."""
        if threading.get_ident() == self._thread:
            self._explained = None
            self._records.close()
            self._open.close()


def _file_of_main() -> str | None:
    """Give the script's file; a script may have taken its module away, or have made something else of the name."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return file if isinstance(file, str) else None


def _open_modes() -> int:
    import torch  # noqa: PLC0415 - as above

    return torch._C._len_torch_dispatch_stack()  # noqa: SLF001 - PyTorch has no public name for it
