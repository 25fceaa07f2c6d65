"""Call something as soon as a module has been imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["after_import"]


def after_import(name: str, call: Callable[[], object]) -> None:
    """Call a function once, when a module's import has succeeded; at once if it is imported already.

    The call is made by the thread that imports the module, before the import statement ends. An import that fails does not
    count: the next one may succeed.

    Args:
        name: The module's dotted name.
        call: What to call.

    Example:
        >>> after_import("sys", lambda: print("sys is there"))
        sys is there
    """
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder(MetaPathFinder):
    """Finds what the other finders find, with a loader that makes the call. It takes itself away after that."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self._name = name
        self._call = call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module; not called for any other."""
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                self._follow(spec)
                return spec
        return None

    def _follow(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        if loader is None:
            return
        real = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            real(module)
            vars(loader).pop("exec_module", None)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._call()

        # The loader is made for this spec alone, and stays what `module.__loader__` is expected to be.
        vars(loader)["exec_module"] = exec_module
