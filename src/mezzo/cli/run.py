"""``mezzo run``: a script as it is, watched, and a report on stderr when it has ended."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import partial
from importlib import import_module
from types import ModuleType

from .after_import import after_import
from .run_plan import RunPlan
from .run_watch import Watch
from .script_runner import run_target

__all__ = ["SetAside", "run_plan"]


class SetAside:
    """Takes the modules of the command line out of ``sys.modules`` while the script runs, and puts them back after it.

    A script whose folder has a ``rich.py`` means that one, and one that imports ``rich`` is to import it for itself.

    Args:
        before: The names in ``sys.modules`` before the command line was imported.

    Example:
        >>> aside = SetAside(set(sys.modules))
        >>> aside.modules
        {}
        >>> aside.put_back()
    """

    def __init__(self, before: AbstractSet[str]) -> None:
        ours = {"mezzo", *sys.stdlib_module_names}
        names = [name for name in sys.modules if name not in before and name.partition(".")[0] not in ours]
        self.modules: dict[str, ModuleType] = {name: sys.modules.pop(name) for name in names}

    def put_back(self) -> None:
        """Put them back, in place of what the script has imported by these names: the report is written with them."""
        sys.modules.update(self.modules)


def run_plan(plan: RunPlan, before: AbstractSet[str]) -> None:
    """Run the script of a plan, watch it, and report at the very end of the process.

    The process is the script's from here on: this returns, or raises, as the script ends. To be called once, in the
    main thread.

    Args:
        plan: What to do.
        before: The names in ``sys.modules`` before the command line was imported.

    Raises:
        SystemExit: As the script does, or since its policy cannot be set.
        BaseException: Whatever the script raises.
    """
    watch = Watch(plan)
    if plan.watches:
        # Imported now, and so set aside with the rest; not after a script that may have changed `sys.path`.
        from .run_report import write_report  # noqa: PLC0415 - a policy alone needs none of it

        # Before the script registers something: what is registered first is called last.
        atexit.register(_report_once, partial(write_report, plan, watch), SetAside(before), os.getpid())
    else:
        SetAside(before)
    if plan.watches or plan.policy is not None:
        # As soon as a package is there that the script may import by itself, and which then is what imports PyTorch.
        after_import("mezzo.torch", watch.start)
        after_import("torch", partial(import_module, "mezzo.torch"))
    try:
        run_target(plan.target, watched=plan.watches)
    except BaseException as error:
        watch.close(error)
        raise
    watch.close()


def _report_once(write: Callable[[], None], aside: SetAside, process: int) -> None:
    if os.getpid() == process:  # and not in a process that the script has forked
        aside.put_back()
        write()
