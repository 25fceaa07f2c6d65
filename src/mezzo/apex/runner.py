"""``python -m mezzo.apex script.py``: run a script that imports `apex`, as it is, on `mezzo.apex`.

The script gets a process that looks as if Python had started it: ``sys.argv``, ``__main__``, ``__file__``, ``sys.path[0]``,
the exit code and tracebacks. Two things differ. A folder with a stand-in for the package `apex` comes after the script's own
in ``sys.path``, and it is put at the front of the environment variable ``PYTHONPATH``, so that processes that the script
starts find the stand-in too. Nothing of this happens on ``import mezzo.apex``.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import NamedTuple

from mezzo.apex import stand_in

__all__ = ["DTYPE_VARIABLE", "main"]

DTYPE_VARIABLE = "MEZZO_APEX_DTYPE"
"""The environment variable from which ``amp.initialize`` takes the low dtype."""

_DTYPES = ("float16", "bfloat16")
_USAGE = "usage: python -m mezzo.apex [--dtype float16|bfloat16] (script.py | -m module) [arguments ...]"
_HELP = f"""{_USAGE}

Run a script that was written for NVIDIA's Apex, unchanged: where it imports apex.amp, apex.parallel, apex.fp16_utils,
apex.optimizers, apex.normalization or apex.multi_tensor_apply it gets mezzo's. Of an installed Apex that has no amp any
more the other parts are used, and one that still has it is left as it is. Processes that the script starts, by
torchrun for instance, get the same.

options:
  --dtype DTYPE  the low precision: float16 as in Apex (the default), or bfloat16; sets {DTYPE_VARIABLE}
  -m module      run a module of that name and not a file
  -h, --help     show this text

With several processes either of these:
  torchrun --nproc-per-node 2 -m mezzo.apex script.py
  python -m mezzo.apex -m torch.distributed.run --nproc-per-node 2 script.py
"""


class _UsageError(Exception):
    """The command line cannot be run; the text says why."""


class _Command(NamedTuple):
    """A command line, read."""

    target: str
    arguments: list[str]
    is_module: bool
    dtype: str | None


def main(arguments: Sequence[str]) -> int:
    """Run a script or module with the stand-in for `apex`.

    Changes the process for good: ``sys.argv``, ``sys.path``, ``sys.modules["__main__"]``, ``os.environ``. It is what
    ``python -m mezzo.apex`` calls, and not meant for a process that goes on to do something else.

    Args:
        arguments: The command line after ``python -m mezzo.apex``.

    Returns:
        The exit code: 0, and 2 if the command line is wrong or there is no such script. What the script raises goes through,
        `SystemExit` with its code too.

    Example:
        >>> main(["--dtype", "float8", "train.py"])
        2
    """
    try:
        command = _read(arguments)
        if command is None:
            sys.stdout.write(_HELP)
            return 0
        run = _module if command.is_module else _script
        spec, path, folder = run(command.target)
    except _UsageError as error:
        sys.stderr.write(f"python -m mezzo.apex: {error}\n{_USAGE}\n")
        return 2
    _prepare(command, folder)
    _show_only_frames_of_scripts()
    argv0 = path if command.is_module else command.target
    sys.argv[:] = [argv0, *command.arguments]
    _execute(spec, path)
    return 0


def _read(arguments: Sequence[str]) -> _Command | None:
    """Read the command line as Python reads its own: options end at the script's name. None asks for help."""
    rest = list(arguments)
    dtype: str | None = None
    while rest:
        first = rest.pop(0)
        if first in ("-h", "--help"):
            return None
        option, equals, value = first.partition("=")
        if option == "--dtype":
            dtype = _dtype(value if equals else rest.pop(0) if rest else "")
        elif first == "-m":
            if not rest:
                msg = "-m is followed by the name of a module."
                raise _UsageError(msg)
            return _Command(rest[0], rest[1:], is_module=True, dtype=dtype)
        elif first.startswith("-"):
            msg = f"there is no option {first!r}; options of the script come after its name."
            raise _UsageError(msg)
        else:
            return _Command(first, rest, is_module=False, dtype=dtype)
    msg = "which script is to be run?"
    raise _UsageError(msg)


def _dtype(name: str) -> str:
    if name not in _DTYPES:
        msg = f"--dtype is {' or '.join(_DTYPES)}, got {name!r}."
        raise _UsageError(msg)
    return name


def _script(name: str) -> tuple[None, str, str | None]:
    """Find a script: no spec, its absolute path, and the folder that Python would put first in ``sys.path``."""
    path = Path(name)
    if not path.is_file():
        what = "is a folder, and not a script" if path.is_dir() else "does not exist"
        msg = f"the script {name!r} {what} (looked in {Path.cwd()})."
        raise _UsageError(msg)
    # As Python does it: the file keeps the name by which it was called, the folder is where the file is.
    return None, os.path.join(Path.cwd(), name), str(path.resolve().parent)  # noqa: PTH118 - Path drops a "./"


def _module(name: str) -> tuple[ModuleSpec, str, None]:
    """Find a module; ``sys.path[0]`` stays what ``python -m`` has made it."""
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(name := f"{name}.__main__")
    if spec is None or spec.origin is None:
        msg = f"there is no module {name!r} that could be run."
        raise _UsageError(msg)
    return spec, spec.origin, None


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # The parent package; any other that is missing is the parent's own affair, as for ``python -m``.
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _prepare(command: _Command, folder: str | None) -> None:
    """Set what the script finds, and what processes that it starts inherit."""
    if command.dtype is not None:
        os.environ[DTYPE_VARIABLE] = command.dtype
    if folder is not None and not sys.flags.safe_path:
        sys.path[0] = folder
    sys.path[:] = [one for one in sys.path if one != stand_in.FOLDER]
    sys.path.insert(0 if sys.flags.safe_path else 1, stand_in.FOLDER)
    inherited = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one != stand_in.FOLDER]
    os.environ["PYTHONPATH"] = os.pathsep.join([stand_in.FOLDER, *inherited])
    stand_in.install()


def _execute(spec: ModuleSpec | None, path: str) -> None:
    """Run the code as ``__main__``, in a module that stays: processes, threads and pickles come back to it."""
    module = _new_main(spec, path)
    if spec is None:
        with io.open_code(path) as file:
            source = file.read()
        code = compile(source, path, "exec", dont_inherit=True)
    else:
        code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _new_main(spec: ModuleSpec | None, path: str) -> types.ModuleType:
    module = types.ModuleType("__main__")
    names: dict[str, object] = {"__file__": path, "__builtins__": builtins}
    if spec is None:
        # Without a spec, processes that multiprocessing spawns read the main module from this file.
        names |= {"__loader__": SourceFileLoader("__main__", path), "__spec__": None}
    else:
        names |= {"__loader__": spec.loader, "__spec__": spec, "__package__": spec.parent}
    # Versions of Python differ in these.
    python_gave = vars(sys.modules["__main__"])
    if "__cached__" in python_gave:
        names["__cached__"] = None if spec is None else spec.cached
    if "__annotations__" in python_gave:
        names["__annotations__"] = {}
    vars(module).update(names)
    return module


def _show_only_frames_of_scripts() -> None:
    """Leave Python's and our frames, which come before the script's, out of tracebacks that nobody else prints."""
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
        trimmed = _trimmed(trace)
        before(kind, value.with_traceback(trimmed), trimmed)

    sys.excepthook = hook


def _trimmed(trace: types.TracebackType | None) -> types.TracebackType | None:
    step = trace
    while step is not None:
        if step.tb_frame.f_code is _execute.__code__:
            return step.tb_next
        step = step.tb_next
    return trace
