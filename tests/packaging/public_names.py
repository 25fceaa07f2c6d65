"""What the modules of the package offer, and whether it is there and documented."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = [
    "FILES",
    "IMPORT_TENSORPLAY",
    "MODULES",
    "SOURCE",
    "assert_offers_are_documented",
    "assert_says_what_is_public",
]

SOURCE = Path(__file__).resolve().parents[2] / "src"
FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
"""The file of each module."""

# The importable `apex` package is imported by its own name only: tests/apex/test_shim.py.
MODULES = [name for name in FILES if "__main__" not in name and ".shim" not in name]

IMPORT_TENSORPLAY = tuple(name for name in MODULES if name.startswith(("mezzo.tensorplay", "mezzo.demo.tensorplay")))
"""Those that need TensorPlay, which can kill the interpreter: tests import them in a process of their own."""


def assert_offers_are_documented(name: str) -> None:
    """Import a module; each name in its ``__all__`` is there, and functions, classes and methods have docstrings."""
    module = importlib.import_module(name)
    assert module.__doc__, name
    if not hasattr(module, "__all__"):
        return
    absent = [offered for offered in module.__all__ if not hasattr(module, offered)]
    assert absent == []
    for label, value in public(module):
        text = inspect.getdoc(value)
        # A dataclass without a docstring is given its signature for one.
        assert text, label
        assert not text.startswith(f"{label}("), label


def assert_says_what_is_public(name: str) -> None:
    """Import a package; it has an ``__all__`` that names nothing twice."""
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__) > 0


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Give the functions and classes that a module offers, and the public methods of the latter."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) and value.__module__.startswith("mezzo"):
            yield name, value
            for method, found in vars(value).items():
                if not method.startswith("_") and (callable(found) or isinstance(found, property | classmethod)):
                    yield f"{name}.{method}", found
        elif inspect.isroutine(value) or inspect.ismodule(value):
            yield name, value
