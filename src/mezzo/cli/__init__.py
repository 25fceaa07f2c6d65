"""The ``mezzo`` command: `mezzo demo`, `mezzo ops` and `mezzo run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["main"]


def main() -> None:
    """Run the command; what the ``mezzo`` script calls.

    Raises:
        SystemExit: With the command's exit status; 2 with a message if the ``cli`` extra is not installed.
        BaseException: What a script raises that ``mezzo run`` runs. Without, this returns when the script has ended.
    """
    before, hook = frozenset(sys.modules), sys.excepthook
    try:
        with _without_current_folder():
            from mezzo.cli.app import app  # noqa: PLC0415 - the core needs no typer
            from mezzo.cli.run_plan import RunScript  # noqa: PLC0415 - as above
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.stderr.write(
            f"the mezzo command needs {error.name}, which is not installed; run: pip install 'mezzo[cli]'\n"
        )
        sys.exit(2)
    try:
        app()
    except RunScript as chosen:
        plan = chosen.plan
    # Outside of the `except`, so that no exception of the script has that one as its context; and typer has put a hook of
    # its own in place of the interpreter's.
    sys.excepthook = hook
    with _without_current_folder():
        from mezzo.cli.run import run_plan  # noqa: PLC0415 - the other commands need none of it
    run_plan(plan, before)


@contextmanager
def _without_current_folder() -> Iterator[None]:
    """Import what the command needs, and not a ``rich.py`` of the user's: ``python -m`` looks into this folder first."""
    first = sys.path[:1] if sys.path[:1] in ([""], [os.getcwd()]) else []  # noqa: PTH109 - `sys.path` holds text
    del sys.path[: len(first)]
    try:
        yield
    finally:
        sys.path[:0] = first
