"""Run the tests of plugged-in accelerators: a process can have one such device, so they have a process of their own."""

from __future__ import annotations

import pytest

from tests.child_suite import ROOT, passes_in_a_child

FOLDER = ROOT / "tests" / "accelerator"


@pytest.mark.slow
def test_all_files_pass_on_the_stand_in() -> None:
    passes_in_a_child(FOLDER)


def test_there_are_such_files() -> None:
    assert {"test_standin", "test_training"} <= {file.stem for file in FOLDER.glob("test_*.py")}
