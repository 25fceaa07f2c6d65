"""Run files of tests in a process of their own, so that a crash of the interpreter is one failed test and no lost run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["ROOT", "failure", "passes_in_a_child"]

ROOT = Path(__file__).resolve().parents[1]

# -v names each test before it runs, so that the last name printed is that of the test that killed the process.
PYTEST = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider")


def passes_in_a_child(path: Path, *, timeout: float = 540, **environment: str) -> None:
    """Run the tests at a path; fail with everything the child printed unless they pass.

    Args:
        path: A file of tests or a folder of them.
        timeout: The seconds that the child may take; below the limit that pytest has for the test which waits.
        **environment: Variables for the child, on top of those here.
    """
    failed = failure(path, timeout=timeout, **environment)
    assert failed is None, failed


def failure(path: Path, *, timeout: float = 540, **environment: str) -> str | None:
    """Run the tests at a path; say how the child ended and what it printed, or None if every test passed."""
    command = [*PYTEST, str(path)]
    # Whoever waits may be a worker of pytest-xdist; the child is none.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as child:
        try:
            printed = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            child.kill()
            ended = f"did not end within {timeout:g} seconds"
            printed = child.communicate()
        else:
            ended = _ending(child.returncode)
    return None if ended is None else f"{path}: the process {ended}\n{printed[0]}\n{printed[1]}"


def _ending(code: int) -> str | None:
    if code == 0:
        return None
    if code > 0:
        return f"ended with status {code}"
    return f"was killed by {signal.Signals(-code).name}"
