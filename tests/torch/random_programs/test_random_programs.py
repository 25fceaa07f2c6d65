"""Random programs agree with the reference and leave nothing behind.

The normal run draws the same programs each time. ``MEZZO_RANDOM_PROGRAMS=5000`` has each test draw so many
others, at random.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

from hypothesis import given
from torch import Tensor

import mezzo.torch

from . import program as p
from .comparing import check, differences_of
from .interpreter import Interpreter
from .profile import profile
from .reference import Reference
from .runner import Runner
from .strategies import POLICIES, programs

ROOT = Path(__file__).parents[3]


@profile(250)
@given(programs(POLICIES))
def test_programs_do_what_the_reference_says(program: p.Program) -> None:
    check(program)


def test_programs_do_what_the_reference_says_where_pytorchs_own_kernels_cast() -> None:
    """Kernels of mezzo's stay once a policy has needed them, so this takes a process in which none has."""
    run = [sys.executable, "-W", "error", "-m", "tests.torch.random_programs"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@profile(20)
@given(programs(POLICIES, default=False))
def test_nothing_holds_the_weights_when_a_program_is_over(program: p.Program) -> None:
    """But what does without autocast too: a tensor that is written into can be saved by what it then comes from."""
    runner = Runner(program)
    notes = runner.run()
    reference = Reference(program, notes)
    reference.run()
    held, held_anyway = _weights_of(runner), _weights_of(reference)
    del runner, reference, notes
    gc.collect()
    assert _alive(held) <= _alive(held_anyway)


def _weights_of(interpreter: Interpreter) -> dict[str, weakref.ref[Tensor]]:
    return {name: weakref.ref(weight) for name, weight in interpreter.weights.items()}


def _alive(weights: dict[str, weakref.ref[Tensor]]) -> set[str]:
    return {name for name, weight in weights.items() if weight() is not None}


def test_a_program_prints_as_one() -> None:
    policy = p.PolicyChoice("unified", (("aten::exp", "fp32"),))
    inner = p.Region((p.Call("linear", ("a", "W", None), "b"), p.Raise()), policy=policy, how="recursive")
    program = p.Program((p.Try((p.Thread((inner,), bound=True),)), p.Backward("b")), p.PolicyChoice("fp32"))
    assert str(program).splitlines() == [
        "set_default_policy('fp32')",
        "try:",
        "    in a new thread, bound:",
        "        @mezzo.autocast('cpu', policy=builtin_policy('unified').override({'aten::exp': 'fp32'}))",
        "        def run(depth):",
        "            b = linear(a, W, None)",
        "            raise Stop",
        "            if depth: run(depth - 1)",
        "        run(1)",
        "except Stop: pass",
        "backward(b)",
    ]


def test_the_comparison_sees_what_it_is_to_see() -> None:
    """A reference that expects other dtypes, other values or another state is contradicted."""
    body = (p.Call("linear", ("a", "W", None), "b"), p.Update("add_", "W"), p.Call("linear", ("a", "W", None), "b"))
    program = p.Program((p.Region(body),))
    real = Runner(program).run()
    assert differences_of(real, Reference(program, real).run()) == []
    unchanged = p.Program((p.Region((body[0], body[2])),))
    other_dtype = p.Program((p.Region(body, policy=p.PolicyChoice("fp32")),))
    assert "statement 1, b = linear(a, W, None): gave" in differences_of(real, Reference(unchanged, real).run())[0]
    assert "in force is" in differences_of(real, Reference(other_dtype, real).run())[0]
    assert mezzo.torch.active_policy("cpu").name == "torch"
