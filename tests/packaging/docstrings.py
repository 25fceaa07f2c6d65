"""The examples in docstrings: which modules have some, and whether they are true."""

from __future__ import annotations

import doctest
import importlib

from tests.process_groups import let_gloo_rest

from .public_names import FILES

__all__ = ["WITH_DOCTESTS", "assert_examples_are_true"]

WITH_DOCTESTS = [name for name, path in FILES.items() if ">>> " in path.read_text(encoding="utf-8")]


def assert_examples_are_true(name: str, *, ellipsis: bool = False) -> None:
    """Run the examples of a module and compare what they print.

    Args:
        name: The module.
        ellipsis: Whether three dots in the output stand for anything.
    """
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS if ellipsis else 0)
    for test in doctest.DocTestFinder().find(module, name):
        runner.run(test, clear_globs=False)
        if "init_process_group" in test.docstring:
            let_gloo_rest()  # the names of the example hold its process group
        test.globs.clear()
    assert runner.tries > 0
    assert runner.failures == 0, "the report above says which"
