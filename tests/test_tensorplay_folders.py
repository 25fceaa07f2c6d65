"""Run the tests in folders of tests/tensorplay, each file in a process of its own, and the conformance tests likewise."""

from __future__ import annotations

from pathlib import Path

import pytest

from .child_suite import ROOT, passes_in_a_child
from .test_tensorplay_suite import FOLDER, needs_tensorplay

FILES = sorted(set(FOLDER.rglob("test_*.py")) - set(FOLDER.glob("test_*.py")))


def name_of(file: Path) -> str:
    """Name a file by its place below the folder."""
    return file.relative_to(FOLDER).with_suffix("").as_posix()


@needs_tensorplay
@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_file_passes_with_tensorplay(file: Path) -> None:
    passes_in_a_child(file)


@needs_tensorplay
def test_conformance_suite_passes_with_tensorplay() -> None:
    passes_in_a_child(ROOT / "tests" / "conformance", MEZZO_CONFORMANCE="tensorplay")


def test_there_are_such_files() -> None:
    assert "packaging/test_public_names" in {name_of(file) for file in FILES}
