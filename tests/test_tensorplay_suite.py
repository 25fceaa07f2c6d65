"""Run the tests of the adapter for TensorPlay, which can kill the interpreter: each file has a process of its own.

Those in folders of tests/tensorplay, and what is not there, are run by test_tensorplay_folders.py: two workers share them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from .child_suite import ROOT, passes_in_a_child

FOLDER = ROOT / "tests" / "tensorplay"
FILES = sorted(FOLDER.glob("test_*.py"))

needs_tensorplay = pytest.mark.skipif(
    find_spec("tensorplay") is None,
    reason="TensorPlay is not installed; it has wheels for Linux on x86_64 with glibc 2.35 or newer",
)


@needs_tensorplay
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_file_passes_with_tensorplay(file: Path) -> None:
    passes_in_a_child(file)


def test_there_are_such_files() -> None:
    assert {"test_regions", "test_casts", "test_choke_points"} <= {file.stem for file in FILES}
