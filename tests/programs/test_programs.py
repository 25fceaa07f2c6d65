"""A program that is forked runs as one that is started: the same arguments, modules, output, status and end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import COMPILER, Server, started

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux alone")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(("numpy", "torch", "torch._dynamo"))
    yield server
    server.close()


@pytest.fixture
def run(server: Server, tmp_path: Path) -> Run:
    def write_and_run(
        program: str, *arguments: str, timeout: float = 60, text: str = "", way: str = "forked", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "program.py").write_text(program, encoding="utf-8")
        runs = server.run if way == "forked" else started
        environment = {**os.environ, **variables}
        return runs([str(tmp_path / "program.py"), *arguments], tmp_path, environment, text=text, timeout=timeout)

    return write_and_run


FACTS = """
import atexit, os, sys, __main__
atexit.register(print, "the end")
print(sys.argv[1:], sys.path[0], sys.warnoptions, os.getcwd(), os.environ["GIVEN"], "LOST" in os.environ)
print(__name__, __file__, __spec__, __main__.FACT if hasattr(__main__, "FACT") else sorted(vars(__main__)))
print(sys.stdin.read(), file=sys.stderr)
print("torch" in sys.modules, "numpy" in sys.modules)
import torch, torch.nn.functional as F
print(sys.modules["torch"].nn.functional is F, "numpy" in sys.modules, "torch._dynamo" in sys.modules)
print(torch.__spec__.loader.__class__.__name__, torch.get_num_threads(), torch.randn(3).shape)
sys.exit(7)
"""


@pytest.mark.slow
def test_a_forked_program_finds_what_a_started_one_finds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"GIVEN": "so", "OMP_NUM_THREADS": "1"}
    forked, own = (run(FACTS, "a", "b c", text="read", way=way, **given) for way in ("forked", "started"))
    assert own.returncode == 7, own.stderr
    assert own.stdout.endswith("the end\n")
    assert (forked.returncode, forked.stdout, forked.stderr) == (own.returncode, own.stdout, own.stderr)


def test_a_module_is_run_by_its_name(server: Server, tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text("import sys\nprint(__name__, __spec__.name, sys.argv[1:], sys.path[0])\n")
    done = server.run(["-m", "named", "x"], tmp_path, os.environ)
    assert (done.stdout, done.stderr) == (f"__main__ named ['x'] {tmp_path}\n", "")


def test_an_import_that_is_forgotten_is_missed(run: Run) -> None:
    """The compiler has loaded this module of PyTorch's, which a program that only imports torch must not find."""
    name = "torch.fx.experimental.symbolic_shapes"
    done = run(f"import sys, torch\nprint({name!r} in sys.modules)\n{name}")
    assert done.stdout == "False\n"
    assert "AttributeError: module 'torch.fx" in done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert (
        run("import torch.fx.experimental.symbolic_shapes as s\nimport torch._dynamo\nprint(s.__name__)").returncode
        == 0
    )


def test_nothing_is_left_of_the_program_before(run: Run) -> None:
    assert run("import torch, os\ntorch.set_default_dtype(torch.float64)\nos.environ['LEFT'] = '1'").returncode == 0
    done = run("import torch, os\nprint(torch.get_default_dtype(), 'LEFT' in os.environ)")
    assert done.stdout == "torch.float32 False\n"


def test_random_numbers_are_other_ones_in_each_program(run: Run) -> None:
    program = (
        "import numpy, random, torch\nprint(torch.rand(1).item(), numpy.random.rand(), random.random(), sep='\\n')"
    )
    first, second = (set(run(program).stdout.split()) for _ in range(2))
    assert len(first | second) == 6


@pytest.mark.parametrize(
    ("program", "status", "last"),
    [
        ("import sys; sys.exit('a reason')", 1, "a reason"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11, None),
        ("import os; os._exit(5)", 5, None),
        ("import warnings; warnings.warn('careful')", 1, "UserWarning: careful"),
        ("def", 1, "SyntaxError: invalid syntax"),
    ],
)
def test_the_end_of_a_program_is_told(run: Run, program: str, status: int, last: str | None) -> None:
    done = run(program)
    assert done.returncode == status
    assert (done.stderr.splitlines() or [None])[-1] == last


def test_what_a_program_defines_can_be_pickled_and_sent_to_a_process_that_it_spawns(run: Run) -> None:
    program = """
from multiprocessing import get_context

class Number:
    def __init__(self, value): self.value = value

def double(number): return Number(2 * number.value)

if __name__ == "__main__":
    with get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [Number(3)])[0].value)
        pool.close()
        pool.join()
"""
    done = run(program)
    assert (done.stdout, done.stderr) == ("6\n", "")


def test_a_program_that_does_not_end_is_killed_and_the_next_one_runs(run: Run) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run("import time; time.sleep(60)", timeout=0.5)
    assert run("print('next')").stdout == "next\n"


COMPILED = "import torch\nprint(torch.compile(lambda x: x + 1, backend='eager')(torch.ones(())))"


def test_a_program_that_compiles_is_refused_and_known_by_its_text(run: Run) -> None:
    done = run(COMPILED)
    assert done.returncode == 1
    assert "this program compiles: it needs a process that has not imported the compiler" in done.stderr
    assert COMPILER.search(COMPILED)
    assert not COMPILER.search("import torch\ntorch.compiler.is_compiling()")


def test_a_server_that_has_ended_runs_nothing(tmp_path: Path) -> None:
    server = Server(("no_such_module_here",))
    assert server.run(["-m", "this"], tmp_path, os.environ).returncode == 0
    server.close()
    with pytest.raises(FileNotFoundError):
        server.run(["-m", "this"], tmp_path, os.environ)
