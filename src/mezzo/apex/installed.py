"""An Apex that is installed besides the stand-in: found, and run in the stand-in's place."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

__all__ = ["find", "has", "run_in_place"]

# The Apex that is meant has some of these. A package for web sites on PyPI, called apex too, has none.
_PARTS = (
    "amp",
    "contrib",
    "fp16_utils",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
    "transformer",
)


def find() -> ModuleSpec | None:
    """Find NVIDIA's Apex outside of the folders of stand-ins.

    Returns:
        Its spec, or None: there is no package `apex`, or it is another one of that name.

    Example:
        >>> from mezzo.apex import installed
        >>> spec = installed.find()  # None, or a spec whose ``origin`` is Apex's ``__init__.py``
    """
    for spec in _specs():
        # A folder without __init__.py, such as the checkout around the package, is a package as well, without an origin.
        if spec.origin is not None and spec.loader is not None and any(has(spec, part) for part in _PARTS):
            return spec
    return None


def _specs() -> Iterator[ModuleSpec]:
    elsewhere = [one for one in sys.path if Path(one).parts[-3:] != ("mezzo", "apex", "shim")]
    for finder in list(sys.meta_path):
        path = elsewhere if finder is importlib.machinery.PathFinder else None
        spec = finder.find_spec("apex", path) if hasattr(finder, "find_spec") else None
        if spec is not None:
            yield spec


def has(spec: ModuleSpec, part: str) -> bool:
    """Say whether a package has a certain submodule, without importing it.

    Args:
        spec: Of the package.
        part: The submodule's name.

    Returns:
        Whether there is a file or folder for it.
    """
    folders = [Path(one) for one in spec.submodule_search_locations or ()]
    return any((one / part / "__init__.py").is_file() or (one / f"{part}.py").is_file() for one in folders)


def run_in_place(module: types.ModuleType, spec: ModuleSpec) -> None:
    """Make a module that is being imported the installed Apex.

    Args:
        module: The stand-in's, in ``sys.modules`` as ``apex``.
        spec: The installed one's, from `find`.

    Raises:
        Exception: Whatever the installed Apex raises when it is imported.
    """
    assert spec.loader is not None
    assert module.__spec__ is not None
    # The spec object stays: the import that is under way notes in it that it is.
    module.__spec__.origin = module.__file__ = spec.origin
    module.__spec__.loader = module.__loader__ = spec.loader
    module.__path__ = module.__spec__.submodule_search_locations = list(spec.submodule_search_locations or ())
    spec.loader.exec_module(module)
