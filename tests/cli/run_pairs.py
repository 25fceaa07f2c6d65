"""Run a script by itself and under ``mezzo run``, in real processes, and compare what an observer sees of the two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

PYTHON = (sys.executable,)
# Nothing is watched with a policy alone, so nothing may be added to what the script writes.
MEZZO = (sys.executable, "-m", "mezzo", "run", "--policy", "fp32")

Seen = tuple[int, str, str]


def run(command: tuple[str, ...], folder: Path, *, stdin: str = "", environment: dict[str, str] | None = None) -> Seen:
    """Give exit status, stdout and stderr."""
    # pytest may have been started by something that ignores it. Not by `preexec_fn`, which forks this process, threads of
    # JAX's and all.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1", **(environment or {})},
        )
    finally:
        signal.signal(signal.SIGINT, before)
    return done.returncode, done.stdout, done.stderr


def same(folder: Path, *arguments: str, stdin: str = "", python: tuple[str, ...] = PYTHON) -> Seen:
    """Require that a script is seen to do the same by itself and under mezzo, and give what it was."""
    alone = run((*python, *arguments), folder, stdin=stdin)
    under = run((*python, *MEZZO[1:], *arguments), folder, stdin=stdin)
    assert under == alone, f"under mezzo {under!r}, alone {alone!r}"
    return alone
