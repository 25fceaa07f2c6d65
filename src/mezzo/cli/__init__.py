"""The ``mezzo`` command: `mezzo demo` and `mezzo ops`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command; what the ``mezzo`` script calls.

    Raises:
        SystemExit: Always, with the command's exit status; 2 with a message if the ``cli`` extra is not installed.
    """
    try:
        from mezzo.cli.app import app  # noqa: PLC0415 - the core needs no typer
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.stderr.write(
            f"the mezzo command needs {error.name}, which is not installed; run: pip install 'mezzo[cli]'\n"
        )
        sys.exit(2)
    app()
