"""What `mezzo.torch.prepare` gains: against autocast over float32 weights, and against a model cast whole to bfloat16.

Every side stores the same encoder in its own way, and then does the same: a forward pass a time, in a region of its own
as a server has it, or training steps.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from benchmarks.models import encoder
from benchmarks.storing import RATE, Stored, Training, store
from benchmarks.work import Work, describe

if TYPE_CHECKING:
    from benchmarks.cases import Case
    from benchmarks.pairing import Side


def prepared_work(case: Case, side: Side) -> Work:
    task, size, against = case.subject.split("-")
    batch, length = (int(number) for number in size.split("x"))
    return _TASKS[task](_way(against, side), *encoder(batch, length), against=against)


def _way(against: str, side: Side) -> str:
    if side == "mezzo":
        return "compiled" if against == "compiled" else "prepare"
    return "bfloat16" if against == "bfloat16" else "autocast"


def _inference(way: str, model: nn.Module, inputs: Tensor, *, against: str) -> Work:
    stored = store(way, model.eval(), inputs)

    def loop(count: int) -> None:
        with torch.inference_mode():
            for _ in repeat(None, count):
                stored.output()

    return Work(loop, lambda: _transformed(stored, inputs, against))


def _transformed(stored: Stored, inputs: Tensor, against: str) -> tuple[str, float]:
    """How far the output is from the input: its own size says nothing after a layer norm."""
    with torch.inference_mode():
        output = stored.output()
    dtype, value = str(output.dtype), describe(output.float() - inputs)[1]
    # A model that is cast whole gives bfloat16 where autocast may give float32.
    return ("torch, of any dtype" if against == "bfloat16" else dtype), value


def _training(way: str, model: nn.Module, inputs: Tensor, *, against: str) -> Work:
    training = Training(way, model, inputs)

    def loop(count: int) -> None:
        for _ in repeat(None, count):
            training.step()

    return Work(loop, lambda: _descent(training, against))


def _descent(training: Training, against: str) -> tuple[str, float]:
    """How far a step goes downhill: the gradient times what the optimizer's float32 weights moved, in learning rates.

    Against a model cast whole it is the length of the gradient alone: steps of this size are lost in bfloat16 weights.
    """
    training.backward()
    slope = torch.cat([weight.grad.flatten().float() for weight in training.model.parameters()])
    before = _weights(training.optimizer)
    training.optimizer.step()
    training.optimizer.zero_grad()
    if against == "bfloat16":
        return describe(slope.norm())
    moved = (_weights(training.optimizer) - before) / RATE
    return describe(slope @ moved)


def _weights(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([weight.detach().flatten() for group in optimizer.param_groups for weight in group["params"]])


_TASKS = {"infer": _inference, "train": _training}
