"""Run a program: in a process of its own from the start, or in one forked from a process that has imported much."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["COMPILER", "IN_ADVANCE", "Server", "run_python", "started"]

IN_ADVANCE = ("numpy", "torch", "torch._dynamo", "sklearn.datasets", "jax", "optax", "flax.linen", "equinox")
"""What the server imports. PyTorch imports the compiler at the first step of an optimizer. None of mezzo: that has to
load in each program by itself. Not TensorPlay either, which must not meet PyTorch."""

COMPILER = re.compile(r"torch\.(compile|jit|export|_dynamo|_inductor)\b|make_fx")
"""In the text of a program that needs a process of its own: mezzo waits for the compiler to be imported, and hears of
nothing where that was done in advance. The server makes a program fail that has none of this and yet compiles."""

OPTIONS = ("-W", "error")

# Tensors are small, and threads would mostly wait for each other. A reader has not asked XLA for eight devices, as the
# tests have; most of the time would be LLVM's, and XLA's older emitters give it the least to do.
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "PYTHONIOENCODING": "utf-8",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
}

Done = subprocess.CompletedProcess[str]


def run_python(
    arguments: Sequence[str], folder: Path | None = None, *, text: str = "", own: bool = False, **variables: str
) -> Done:
    """Run Python with warnings as errors, and give what it printed and its status.

    Args:
        arguments: A script and its arguments, or ``-m`` and a module's.
        folder: Where; here by default.
        text: What it reads from standard input.
        own: Whether it needs a process that has imported nothing before it.
        **variables: For its environment, on top of those here.
    """
    environment = {**os.environ, **VARIABLES, **variables}
    place = folder or Path.cwd()
    if own or sys.platform != "linux":  # elsewhere the system's libraries have threads that no fork survives
        return started(arguments, place, environment, text=text)
    return _server().run(arguments, place, environment, text=text)


def started(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], *, text: str = "", timeout: float = 300
) -> Done:
    """Run a program in a process of its own from the start."""
    return subprocess.run(
        [sys.executable, *OPTIONS, *arguments],
        cwd=folder,
        env=environment,
        input=text,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        check=False,
    )


class Server:
    """A process that has imported some packages, and forks one for each program; one program at a time.

    Args:
        names: The modules. One that is not installed is left out.
    """

    def __init__(self, names: Sequence[str] = IN_ADVANCE) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *OPTIONS, str(Path(__file__).with_name("server.py")), *names],
            env={**os.environ, **VARIABLES},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._folder = tempfile.TemporaryDirectory()

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        text: str = "",
        timeout: float = 300,
    ) -> Done:
        """Run a program; see `run_python`. What was read from the environment by an import is the server's."""
        read, out, err = (Path(self._folder.name, name) for name in ("in", "out", "err"))
        read.write_text(text, encoding="utf-8")
        request = {
            "arguments": list(arguments),
            "folder": str(folder),
            "environment": dict(environment),
            "stdin": str(read),
            "stdout": str(out),
            "stderr": str(err),
        }
        self._tell(json.dumps(request))
        process = self._hear(60)
        try:
            status = self._hear(timeout)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            self._hear(60)
            raise
        return subprocess.CompletedProcess(
            list(arguments), status, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8")
        )

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    def _hear(self, seconds: float) -> int:
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired(self._process.args, seconds)
        line = output.readline()
        assert line, "the server has ended; its last words are on standard error"
        return int(line)

    def close(self) -> None:
        """End the server."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(timeout=60)
        self._folder.cleanup()


@functools.cache
def _server() -> Server:
    """Start the server of this process, which ends with it."""
    server = Server()
    atexit.register(server.close)
    return server
