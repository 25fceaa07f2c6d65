"""Run the tests of plugged-in accelerators: a process can have one such device, so each file has a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "tests" / "accelerator").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_file_passes_on_the_stand_in(file: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_such_files() -> None:
    assert {"test_standin", "test_training"} <= {file.stem for file in FILES}
