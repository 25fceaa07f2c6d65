"""Scripts run in processes of their own, as users run them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
STAND_IN = ("-m", "mezzo.apex")


def python(
    *arguments: str | Path,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
    warnings: Sequence[str] = ("-W", "error"),
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, with warnings as errors."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MEZZO_APEX_DTYPE")}
    return subprocess.run(
        [sys.executable, *warnings, *map(str, arguments)],
        cwd=cwd,
        env={**inherited, "OMP_NUM_THREADS": "1", **(environment or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def output(*arguments: str | Path, **options: object) -> str:
    """Run a script with the stand-in, see that it ends well and says nothing on stderr, and give what it printed."""
    done = python(*STAND_IN, *arguments, **options)  # type: ignore[arg-type]
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout
