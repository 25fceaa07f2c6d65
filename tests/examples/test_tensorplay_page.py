"""The page on TensorPlay lists each defect of native autocast with the test that shows it, and leaves none out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tensorplay.md"
SHOWN_BY = ROOT / "tests" / "tensorplay" / "test_defects_native.py"


def test_the_list_of_defects_names_each_test_once() -> None:
    """By reading the file of tests: importing it would import TensorPlay."""
    functions = [
        node for node in ast.parse(SHOWN_BY.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)
    ]
    tests = [function.name for function in functions if function.name.startswith("test_")]
    named = re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(tests) >= 10
    assert sorted(named) == sorted(tests)


def test_the_page_names_examples_that_are_there() -> None:
    named = re.findall(r"`examples/(tensorplay_\w+\.py)`", PAGE.read_text(encoding="utf-8"))
    assert named
    assert [name for name in named if not (ROOT / "examples" / name).exists()] == []
