"""`after_import`: a call as soon as a module is there, and nothing else about the import changes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mezzo.cli.after_import import after_import


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield tmp_path
    for name in ("awaited", "other"):
        sys.modules.pop(name, None)


def test_it_calls_once_when_the_module_is_complete(folder: Path) -> None:
    (folder / "awaited.py").write_text("value = 1\n")
    seen: list[object] = []
    finders = [*sys.meta_path]
    after_import("awaited", lambda: seen.append(sys.modules["awaited"].value))
    importlib.import_module("awaited")
    assert seen == [1]
    assert sys.meta_path == finders
    importlib.reload(sys.modules["awaited"])
    assert seen == [1]


def test_it_calls_at_once_for_a_module_that_is_there() -> None:
    seen: list[int] = []
    finders = [*sys.meta_path]
    after_import("sys", lambda: seen.append(1))
    assert seen == [1]
    assert sys.meta_path == finders


def test_the_module_is_as_without_it(folder: Path) -> None:
    (folder / "awaited.py").write_text("here = [__name__, __file__, type(__loader__), __spec__.origin]\n")
    plain = importlib.import_module("awaited").here
    del sys.modules["awaited"]
    after_import("awaited", lambda: None)
    module = importlib.import_module("awaited")
    assert module.here == plain
    assert "exec_module" not in vars(module.__loader__)


def test_a_failing_import_does_not_count_and_the_next_may_succeed(folder: Path) -> None:
    (folder / "other.py").write_text("ready = False\n")
    (folder / "awaited.py").write_text("import other\nif not other.ready:\n    raise ImportError('not yet')\n")
    seen: list[int] = []
    after_import("awaited", lambda: seen.append(1))
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module("awaited")
    assert seen == []
    sys.modules["other"].ready = True  # type: ignore[attr-defined]
    importlib.import_module("awaited")
    assert seen == [1]


def test_looking_whether_a_module_exists_does_not_count(folder: Path) -> None:
    (folder / "awaited.py").write_text("")
    seen: list[int] = []
    after_import("awaited", lambda: seen.append(1))
    assert importlib.util.find_spec("awaited") is not None
    assert (seen, "awaited" in sys.modules) == ([], False)


def test_a_module_that_does_not_exist_is_not_found(folder: Path) -> None:
    after_import("awaited", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="No module named 'awaited'"):
        importlib.import_module("awaited")


def test_the_thread_that_imports_makes_the_call(folder: Path) -> None:
    (folder / "awaited.py").write_text("")
    seen: list[int] = []
    after_import("awaited", lambda: seen.append(threading.get_ident()))
    thread = threading.Thread(target=importlib.import_module, args=("awaited",))
    thread.start()
    thread.join()
    assert seen == [thread.ident]
