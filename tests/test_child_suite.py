"""A file of tests that runs in a process of its own reports what happened there, crashes too."""

from __future__ import annotations

from pathlib import Path

import pytest

from .child_suite import failure, passes_in_a_child


def written(folder: Path, *lines: str) -> Path:
    """Write a file of tests."""
    file = folder / "test_written.py"
    file.write_text("\n".join(["import os, signal, sys", *lines, ""]), encoding="utf-8")
    return file


def test_a_file_whose_tests_pass_is_no_failure(tmp_path: Path) -> None:
    file = written(tmp_path, "def test_a(): pass")
    assert failure(file) is None
    passes_in_a_child(file)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGFPE", "SIGKILL"])
def test_a_child_that_dies_by_a_signal_is_reported_with_the_signal_and_the_test_that_ran(
    tmp_path: Path, name: str
) -> None:
    file = written(tmp_path, "def test_first(): pass", f"def test_deadly(): os.kill(os.getpid(), signal.{name})")
    with pytest.raises(AssertionError, match=f"was killed by {name}") as caught:
        passes_in_a_child(file)
    report = str(caught.value)
    assert "test_first PASSED" in report
    assert report[report.index("test_first PASSED") :].count("test_deadly") >= 1


def test_a_child_that_leaves_by_itself_is_a_failure_with_its_status(tmp_path: Path) -> None:
    file = written(tmp_path, "def test_a(): os._exit(7)")
    assert "ended with status 7" in str(failure(file))


def test_a_failed_test_is_shown_with_what_it_printed(tmp_path: Path) -> None:
    file = written(tmp_path, "def test_a():", "    print('to be seen')", "    assert 1 + 1 == 3, 'no sum'")
    report = str(failure(file))
    assert "ended with status 1" in report
    assert "no sum" in report
    assert "to be seen" in report


def test_a_file_without_tests_is_a_failure(tmp_path: Path) -> None:
    assert "ended with status 5" in str(failure(written(tmp_path)))


def test_a_child_that_hangs_is_killed_and_its_output_shown(tmp_path: Path) -> None:
    file = written(tmp_path, "import time", "def test_quick(): pass", "def test_slow(): time.sleep(60)")
    report = str(failure(file, timeout=4))
    assert "did not end within 4 seconds" in report
    assert "test_quick PASSED" in report


def test_a_child_gets_the_variables_it_is_given_and_is_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    file = written(
        tmp_path,
        "def test_a():",
        "    assert os.environ['MEZZO_GIVEN'] == 'so'",
        "    assert 'PYTEST_XDIST_WORKER' not in os.environ",
    )
    assert failure(file, MEZZO_GIVEN="so") is None
