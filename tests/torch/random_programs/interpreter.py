"""What both ways to run a program share: the order of its statements, its values, and the notes that are compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from threading import Thread as NewThread
from typing import Any

import torch
from torch import Tensor

from mezzo import Policy
from mezzo.errors import BannedOpError

from . import program as p
from .changing import change
from .operations import OPERATIONS, WEIGHTS, Operation, new_registers, new_weights

__all__ = ["Interpreter", "Note", "State", "run_in_thread"]

ERRORS = (RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class State:
    """What is in force.

    Attributes:
        enabled: Whether autocast is on.
        low: The lower-precision dtype.
        cache_enabled: The cache flag.
        policy: What rules, or would if autocast were on.
    """

    enabled: bool
    low: torch.dtype
    cache_enabled: bool
    policy: Policy


@dataclass
class Note:
    """What one statement has done.

    Attributes:
        line: The statement.
        state: What was in force.
        raised: ``"banned"``, ``"error"``, or empty.
        value: The register that the statement writes, afterwards.
        grads: Of a backward pass: the gradients of the weights.
        slack: Of a backward pass by the reference: how far each gradient may be off.
    """

    line: str
    state: State
    raised: str = ""
    value: Tensor | None = None
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    slack: dict[str, Tensor] = field(default_factory=dict)


class Interpreter(ABC):
    """Runs the statements that mean the same with and without autocast.

    Args:
        program: The program.
    """

    def __init__(self, program: p.Program) -> None:
        self.program = program
        self.weights = new_weights()
        self.registers = new_registers()
        self.notes: list[Note] = []

    def run(self) -> list[Note]:
        """Run the program; give its notes."""
        with suppress(p.Stop):
            self.block(self.program.body)
        return self.notes

    def block(self, block: p.Block) -> None:
        for statement in block:
            _DO[type(statement)](self, statement)

    @abstractmethod
    def state(self) -> State:
        """Give what is in force."""

    @abstractmethod
    def apply(self, operation: Operation, args: list[Tensor | None]) -> Tensor:
        """Call an op."""

    @abstractmethod
    def region(self, region: p.Region) -> None:
        """Run a region's block in it."""

    @abstractmethod
    def generator(self, generator: p.Generator) -> None:
        """Run a decorated generator and its loop."""

    @abstractmethod
    def thread(self, thread: p.Thread) -> None:
        """Run a block in a new thread."""

    @abstractmethod
    def keeping(self) -> AbstractContextManager[Any]:
        """Give what surrounds a block in which casts are kept."""

    def noted_slack(self) -> dict[str, Tensor]:
        """Give how far the gradients of the backward pass that has just run may be off."""
        return {}

    def call(self, call: p.Call) -> None:
        operation = OPERATIONS[call.op]
        note = Note(call.lines()[0], self.state())
        self.notes.append(note)
        try:
            args = [None if name is None else operation.prepare(self._value(name)) for name in call.args]
            self.registers[call.target] = operation.finish(self.apply(operation, args))
        except ERRORS as error:
            note.raised = _kind(error)
        note.value = self.registers[call.target].detach().clone()

    def backward(self, backward: p.Backward) -> None:
        note = Note(backward.lines()[0], self.state())
        self.notes.append(note)
        result = self.registers[backward.register]
        try:
            # The graph stays, so that a pass that one of both interrupts leaves the same to the next.
            torch.autograd.backward(result, torch.full_like(result, 0.5), retain_graph=True)
        except ERRORS as error:
            note.raised = _kind(error)
        else:
            note.grads = {name: weight.grad for name, weight in self.weights.items()}
        note.slack = self.noted_slack()
        for weight in self.weights.values():
            weight.grad = None

    def update(self, update: p.Update) -> None:
        change(update.how, update.weight, self.weights)

    def grad(self, grad: p.Grad) -> None:
        with getattr(torch, grad.mode)():
            self.block(grad.body)

    def attempt(self, attempt: p.Try) -> None:
        with suppress(p.Stop):
            self.block(attempt.body)

    def stop(self, _: p.Raise) -> None:
        raise p.Stop

    def clear(self, _: p.ClearCache) -> None:
        torch.clear_autocast_cache()

    def keep(self, keep: p.KeepCasts) -> None:
        with self.keeping():
            self.block(keep.body)

    def surround(self, around: p.Region | None, inner: Callable[[], None]) -> None:
        """Run something in a region that is opened by ``with``, or in none."""
        with nullcontext() if around is None else self.opened(around):
            inner()

    @abstractmethod
    def opened(self, region: p.Region) -> AbstractContextManager[Any]:
        """Give the context manager of a region."""

    def _value(self, name: str) -> Tensor:
        return self.weights[name] if name in WEIGHTS else self.registers[name]


_DO: dict[type, Callable[[Any, Any], None]] = {
    p.Region: lambda interpreter, statement: interpreter.region(statement),
    p.Generator: lambda interpreter, statement: interpreter.generator(statement),
    p.Thread: lambda interpreter, statement: interpreter.thread(statement),
    p.Grad: Interpreter.grad,
    p.KeepCasts: Interpreter.keep,
    p.Try: Interpreter.attempt,
    p.Raise: Interpreter.stop,
    p.Call: Interpreter.call,
    p.Backward: Interpreter.backward,
    p.Update: Interpreter.update,
    p.ClearCache: Interpreter.clear,
}


def run_in_thread(function: Callable[[], None]) -> None:
    """Run a function in a new thread, to its end; what it raises is raised here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = NewThread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised.pop()


def _kind(error: Exception) -> str:
    return "banned" if isinstance(error, BannedOpError) else "error"
