"""Run a script or a module as ``python SCRIPT`` and ``python -m MODULE`` do: names, paths, arguments and tracebacks.

The script's own exceptions and exits go through as they are, so the exit status is Python's own affair; only the frames
of the runner are taken out of the traceback when Python comes to print it.
"""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from itertools import dropwhile, takewhile
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from . import after_import
from .watch_frames import chained, entries, file_of, shorten_others, without_watchers

__all__ = ["Target", "run_target", "without_runner"]

_STARTED: list[ModuleType] = []
"""The first ``__main__``. CPython up to 3.11 takes ``__file__`` out of it at the end without holding it."""


@dataclass(frozen=True)
class Target:
    """What to run.

    Attributes:
        name: The path of a script, of a folder or zip file with a ``__main__.py``, or a module's dotted name.
        arguments: What the script finds after its own name in ``sys.argv``.
        module: Whether ``name`` is a module's name, as after ``python -m``.

    Example:
        >>> Target("train.py", ("--lr", "0.1")).module
        False
    """

    name: str
    arguments: tuple[str, ...] = ()
    module: bool = False


def run_target(target: Target, *, watched: bool = False) -> None:
    """Run a script in this process, as its ``__main__`` module.

    ``sys.argv``, ``sys.orig_argv``, ``sys.path[0]`` and ``sys.modules["__main__"]`` become what they are in
    ``python SCRIPT`` and stay so: the process is the script's from here on. To be called once, in the main thread.

    Args:
        target: What to run.
        watched: Whether mezzo watches its ops, and so has frames in the traceback of one that fails.

    Raises:
        SystemExit: The script ended so, or the module cannot be found; the message then is that of ``python -m``.
        BaseException: Whatever the script raises. The traceback that Python prints has no frames of the runner.

    Example:
        >>> run_target(Target("train.py", ("--lr", "0.1")))  # doctest: +SKIP
    """
    sys.orig_argv[:] = _original(target)
    _STARTED.append(sys.modules["__main__"])
    sys.modules["__main__"] = _fresh_main(sys.modules["__main__"])
    try:
        if target.module:
            _run_module(target)
        else:
            _run_script(target)
    except SystemExit:
        raise
    except BaseException:
        # Python prints the traceback when it has left the last frame, so that is when to shorten it.
        _shorten_what_is_printed(watched=watched)
        raise


def without_runner(trace: TracebackType | None) -> TracebackType | None:
    """Take the frames of the runner out of a traceback.

    Args:
        trace: A traceback, outermost frame first.

    Returns:
        The traceback without what leads up to the script, and without what calls mezzo when PyTorch has been imported.

    Example:
        >>> without_runner(None) is None
        True
    """
    before = [*takewhile(lambda entry: file_of(entry) != __file__, entries(trace))]
    shown: list[TracebackType] = []
    for entry in dropwhile(lambda entry: file_of(entry) == __file__, [*entries(trace)][len(before) :]):
        if file_of(entry) != after_import.__file__:
            shown.append(entry)
            continue
        while shown and file_of(shown[-1]).startswith("<frozen importlib."):
            shown.pop()
    return chained(shown)


def _shorten_what_is_printed(*, watched: bool) -> None:
    hook = sys.excepthook

    def shortened(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook
        trace = without_runner(trace)
        if watched:
            trace = without_watchers(trace)
            shorten_others(error)
        # Not by assignment: the class may have a `__setattr__` that raises.
        BaseException.with_traceback(error, trace)
        sys.last_traceback = trace
        try:
            hook(kind, error, trace)
        except SystemExit:
            raise
        except BaseException as failed:  # noqa: BLE001 - printed, as Python does with what a hook raises
            _print_both(failed, error)

    sys.excepthook = shortened


def _print_both(failed: BaseException, error: BaseException) -> None:
    """Print what Python prints when a hook fails, without the frame that has called the hook."""
    for head, one, skip in (("Error in sys.excepthook:\n", failed, 1), ("\nOriginal exception was:\n", error, 0)):
        with suppress(OSError, ValueError, AttributeError):  # there may be no stream to write to
            sys.stderr.write(head)
        shown = chained([*entries(one.__traceback__)][skip:])
        BaseException.with_traceback(one, shown)
        sys.__excepthook__(type(one), one, shown)


def _original(target: Target) -> list[str]:
    """Give the command line as if the script had been started by itself, with the interpreter's options that there are."""
    head = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]
    head = head[:-2] if head[-2:-1] == ["-m"] else head[:-1]
    return [*head, *(["-m"] if target.module else []), target.name, *target.arguments]


def _fresh_main(old: ModuleType) -> ModuleType:
    """Make a ``__main__`` with the names that Python gives its own, and none that mezzo's start has left in it."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    fresh: dict[str, object] = {"__annotations__": {}, "__cached__": None}
    main.__dict__.update({name: value for name, value in fresh.items() if name in vars(old)})
    return main


def _run_module(target: Target) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # noqa: PTH109 - `sys.path` holds text
    sys.argv = ["-m", *target.arguments]
    runpy._run_module_as_main(target.name)  # type: ignore[attr-defined]  # noqa: SLF001 - what `python -m` itself calls


def _run_script(target: Target) -> None:
    sys.argv = [target.name, *target.arguments]
    path = os.path.join(os.getcwd(), target.name)  # noqa: PTH109, PTH118 - not normalized, as by Python
    if pkgutil.get_importer(path) is not None:  # a folder or a zip file
        _set_path(path, always=True)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # noqa: SLF001 - as above
        return
    _set_path(str(Path(path).resolve().parent), always=False)
    main = sys.modules["__main__"]
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    exec(_code_of(path), main.__dict__)


def _set_path(first: str, *, always: bool) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = first
    elif always:
        sys.path.insert(0, first)


def _code_of(path: str) -> CodeType:
    with io.open_code(path) as stream:
        data = stream.read()  # once: the path may be that of a pipe
    compiled: CodeType | None = pkgutil.read_code(io.BytesIO(data))
    return compile(data, path, "exec", dont_inherit=True) if compiled is None else compiled
