"""The files that take longest are run first."""

from __future__ import annotations

import subprocess
import sys

from .child_suite import ROOT
from .slow_files import HERE, SLOW


def test_each_slow_file_is_there_and_named_once() -> None:
    assert [name for name in SLOW if not (HERE / name).is_file()] == []
    assert len(set(SLOW)) == len(SLOW)


def test_slow_files_come_first_and_all_else_stays_in_order() -> None:
    names = [
        "core/test_report.py",
        "packaging/test_wheel.py",
        "core/test_policy_file.py",
        "packaging/test_documents.py",
    ]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in names)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    seen = dict.fromkeys(line.split("::")[0] for line in done.stdout.splitlines() if "::" in line)
    assert list(seen) == [f"tests/{name}" for name in (names[3], *names[:3])]
