"""The tests of kept casts once with PyTorch's own kernels, and once with mezzo's in their place.

In one process they meet whatever the tests before them have had registered, which is never taken back.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BEFORE = {
    "PyTorch's kernels": "",
    "mezzo's kernels": "from mezzo.torch import set_default_policy as s; s('default'); s(None)",
}


@pytest.mark.slow
@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_kept_casts(before: str) -> None:
    files = [str(HERE / name) for name in ("test_kept_casts.py", "test_keep_casts.py")]
    options = ["-q", "--tb=short", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys, pytest\n{before}\nsys.exit(pytest.main(sys.argv[1:]))", *files, *options],
        check=False,
        cwd=HERE.parents[1],
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-3000:]
