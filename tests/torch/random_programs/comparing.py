"""How the notes of a real run are held against those of the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import mezzo.torch
from mezzo import CastPolicy
from tests.conftest import _reset_state

from . import program as p
from .interpreter import Note
from .leftovers import leftovers
from .reference import Reference
from .runner import Runner

__all__ = ["check"]

_LARGEST_FLOAT16 = 6e4


def check(program: p.Program) -> None:
    """Run a program both ways.

    Args:
        program: The program.

    Raises:
        AssertionError: They differ, or the run has left something behind; says where, and prints the program.
    """
    default = program.default_policy
    before = leftovers()
    mezzo.torch.set_default_policy(None if default is None else default.policy())
    try:
        real = Runner(program).run()
    finally:
        mezzo.torch.set_default_policy(None)
        after = leftovers()
        if after != before:
            _reset_state()  # for the next program
    differences = [f"left behind: {name}: {after[name]}" for name in before if before[name] != after[name]]
    differences += differences_of(real, Reference(program, real).run())
    assert not differences, "\n".join([*differences[:3], "in the program", str(program)])


def differences_of(real: Sequence[Note], expected: Sequence[Note]) -> list[str]:
    """Say where the notes of a run are not those that are expected; the first difference makes others."""
    if [note.line for note in real] != [note.line for note in expected]:
        return [f"ran {[note.line for note in real]}, expected {[note.line for note in expected]}"]
    found = []
    for place, (one, other) in enumerate(zip(real, expected, strict=True)):
        said = _state(one, other) or (_backward(one, other) if one.value is None else _call(one, other))
        if said:
            found.append(f"statement {place}, {one.line}: {said}")
    return found


def _state(real: Note, expected: Note) -> str:
    return "" if real.state == expected.state else f"in force is {real.state}, expected {expected.state}"


def _call(real: Note, expected: Note) -> str:
    if real.raised != expected.raised:
        return f"raised {real.raised or 'nothing'}, expected {expected.raised or 'nothing'}"
    value, wanted = real.value, expected.value
    assert value is not None
    assert wanted is not None
    if value.dtype != wanted.dtype:
        return f"gave {value.dtype}, expected {wanted.dtype}"
    if not torch.equal(value.nan_to_num(), wanted.nan_to_num()) or not torch.equal(value.isnan(), wanted.isnan()):
        return f"gave {value.tolist()}, expected {wanted.tolist()}"
    return ""


def _backward(real: Note, expected: Note) -> str:
    inside = real.state.enabled
    if real.raised != expected.raised:
        # In a region the ops of a backward pass follow its rules too; the reference does not know which these are.
        return "" if inside else f"raised {real.raised or 'nothing'}, expected {expected.raised or 'nothing'}"
    if real.raised:
        return ""
    if inside and real.state.policy.rule_of("aten::add.Tensor", "bfloat16") not in ("device", CastPolicy.FALLTHROUGH):
        return ""  # autograd sums gradients by that op
    for name, wanted in expected.grads.items():
        said = _gradient(real.grads[name], wanted, None if inside else expected.slack.get(name, torch.zeros(())))
        if said:
            return f"the gradient of {name} {said}"
    return ""


def _gradient(grad: Tensor | None, wanted: Tensor | None, slack: Tensor | None) -> str:
    if grad is None or wanted is None:
        return "" if grad is wanted else f"is {grad}, expected {wanted}"
    if grad.dtype != wanted.dtype:
        return f"is of {grad.dtype}, expected {wanted.dtype}"
    if slack is None or not bool(wanted.isfinite().all()) or float(slack.max()) * 2**8 > _LARGEST_FLOAT16:
        return ""
    bound = slack + 1e-5 * wanted.abs().max()
    if bool(((grad - wanted).abs() > bound).any()):
        return f"is {grad.tolist()}, expected {wanted.tolist()} within {bound.tolist()}"
    return ""
