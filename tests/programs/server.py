"""The process that programs are forked from: it has imported what most of them import, and has computed nothing.

Each line of its input is a request in JSON: a program's arguments, as Python takes them, its folder, its environment,
and the files for what it reads and prints. It answers with the program's process, and when that has ended with its status.

    python -W error server.py torch sklearn.datasets
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any


def program(names: list[str]) -> list[str]:
    """Serve, and come back in each program's process with its arguments."""
    requests, answers = os.fdopen(os.dup(0), "rb", buffering=0), os.dup(1)
    stages = prepare(names)
    while line := requests.readline():
        request: dict[str, Any] = json.loads(line)
        process = os.fork()
        if process == 0:
            requests.close()
            os.close(answers)
            seed_anew(stages)
            return settle(request)
        os.write(answers, f"{process}\n".encode())
        _, status = os.waitpid(process, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    requests.close()
    sys.exit(0)


def prepare(names: list[str]) -> Any:
    """Import what is installed of these; neither the tests' folder nor this one is where programs import from."""
    from stages import Stages

    sys.path.pop(0)
    del sys.modules["stages"]
    stages = Stages()
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]):
            stages.load(name)
            if name == "torch._dynamo":
                refuse_to_compile()
    stages.hide()
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:  # a lock that one of them holds would stay locked in every program
        sys.exit(f"{threads} threads run after the imports of {names}: processes cannot be forked from here")
    gc.collect()
    gc.freeze()
    return stages


def seed_anew(stages: Any) -> None:
    """Give the random numbers of a program a start of their own, as those have that each process chooses for itself."""
    if (torch := stages.loaded("torch")) is not None:
        torch.seed()
    if (numpy_random := stages.loaded("numpy.random")) is not None:
        numpy_random.seed()
    stages.hide()  # functions of PyTorch's import what they need when they are called


def refuse_to_compile() -> None:
    """Have `torch.compile` fail in programs: who waits for the import of the compiler waits for each module of it."""
    from torch._dynamo.callback import callback_handler

    def install_callbacks(*args: object, **kwargs: object) -> None:
        msg = "this program compiles: it needs a process that has not imported the compiler, see tests/programs"
        raise RuntimeError(msg)

    callback_handler.install_callbacks = install_callbacks


def settle(request: dict[str, Any]) -> list[str]:
    """Make this the process of the program that was asked for."""
    os.setpgid(0, 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, (path, mode) in enumerate(
        ((request["stdin"], os.O_RDONLY), (request["stdout"], flags), (request["stderr"], flags))
    ):
        opened = os.open(path, mode)
        os.dup2(opened, number)
        os.close(opened)
    arguments: list[str] = request["arguments"]
    return arguments


def run(arguments: list[str]) -> None:
    """Run a program as Python does that is started with these arguments."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing's other name of it
        sys.modules["__mp_main__"] = main
    first, *rest = arguments
    if first == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = rest
        runpy._run_module_as_main(rest[0])
        return
    sys.path.insert(0, str(Path(first).resolve().parent))
    sys.argv = arguments
    main.__file__, main.__loader__ = first, SourceFileLoader("__main__", first)
    main.__dict__["__cached__"] = None
    exec(compile(Path(first).read_bytes(), first, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    # Returns in the processes of programs, which end as any does: with their exceptions, their status, and atexit.
    run(program(sys.argv[1:]))
