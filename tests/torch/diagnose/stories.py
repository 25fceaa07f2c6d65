"""The scripts of `examples/diagnose`, as modules."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "diagnose"


@functools.cache
def story(name: str) -> ModuleType:
    """Load a script without running it, once: one of them registers an op."""
    spec = importlib.util.spec_from_file_location(f"story_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
