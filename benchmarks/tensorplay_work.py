"""The work of the TensorPlay cases: for a case and a side, a loop to be timed and a probe that says what it computes.

This module is imported by workers only. mezzo is imported inside the functions that need it: a process that plays native
autocast's side must never load it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import TYPE_CHECKING, Any

import tensorplay
from tensorplay import nn
from tensorplay.nn import functional as F

from benchmarks.work import Work

if TYPE_CHECKING:
    from benchmarks.pairing import Side
    from benchmarks.tensorplay_cases import TensorplayCase

Call = Callable[[], Any]
Region = Callable[[], AbstractContextManager[Any]]

LOW = tensorplay.bfloat16


def build(case: TensorplayCase, side: Side) -> Work:
    """Prepare the work of one side; seeded, so that every side computes the same numbers."""
    tensorplay.manual_seed(0)
    return _BUILDERS[case.workload](case.subject, side)


def _region(side: Side) -> Region:
    """The side's autocast, under the policy that it has by default."""
    if side != "mezzo":
        return lambda: tensorplay.autocast("cpu", dtype=LOW)
    from mezzo.tensorplay import autocast

    return lambda: autocast("cpu", dtype=LOW)


def _describe(result: Any) -> tuple[str, float]:
    return str(result.dtype), float(result.detach().double().square().mean())


# Layers


class _NormByHand(nn.LayerNorm):
    """What a careful person writes under native autocast: the norm in float32."""

    def forward(self, x: Any) -> Any:
        return super().forward(x.float())


def _layer_work(subject: str, side: Side) -> Work:
    size, against = subject.split("-", 1)
    # Many short sequences: TensorPlay's backward pass of attention over 512 tokens takes ten times the rest of the layer.
    width, batch, length = (256, 8, 64) if size == "256" else (64, 1, 32)
    model = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    inputs = tensorplay.randn(batch, length, width)
    is_native = side != "mezzo"
    if is_native and against == "by-hand":
        for name in ("norm1", "norm2"):
            setattr(model, name, _NormByHand(width))
    region = nullcontext if is_native and against == "float32" else _region(side)
    parameters = list(model.parameters())

    def loop(count: int) -> None:
        for _ in repeat(None, count):
            for parameter in parameters:
                parameter.grad = None
            with region():
                output = model(inputs)
            output.float().square().mean().backward()

    def probe() -> tuple[str, float]:
        # How many gradients there are, and no value of theirs: native autocast's are not right.
        loop(1)
        gradients = [parameter.grad for parameter in parameters]
        return str({str(each.dtype) for each in gradients}), float(sum(each.numel() for each in gradients))

    return Work(loop, probe)


# Calls


def _square(dtype: Any = tensorplay.float32) -> Any:
    return tensorplay.randn(8, 8).to(dtype)


def _mm_low() -> Call:
    x, y = _square(LOW), _square(LOW)
    return lambda: tensorplay.mm(x, y)


def _mm_leaf() -> Call:
    x, weight = _square(LOW), nn.Parameter(_square())
    return lambda: tensorplay.mm(x, weight)


def _mm_activations() -> Call:
    x, y = (_square().requires_grad_() * 1.0 for _ in range(2))
    return lambda: tensorplay.mm(x, y)


def _matmul_operator() -> Call:
    x, y = _square(LOW), _square(LOW)
    return lambda: x @ y


def _linear() -> Call:
    x, weight, bias = _square(LOW), nn.Parameter(_square()), nn.Parameter(tensorplay.randn(8))
    return lambda: F.linear(x, weight, bias)


def _prod() -> Call:
    x = _square(LOW)
    return lambda: tensorplay.prod(x)


def _mse_loss() -> Call:
    x, target = _square(LOW), _square(LOW)
    return lambda: F.mse_loss(x, target)


def _cat() -> Call:
    pieces = [_square(LOW), _square()]
    return lambda: tensorplay.cat(pieces)


def _layer_norm() -> Call:
    # Of equal numbers the norm is 0, with whatever weights: what native autocast computes can be compared.
    x, weight, bias = tensorplay.ones(8, 8).to(LOW), nn.Parameter(tensorplay.ones(8)), nn.Parameter(tensorplay.zeros(8))
    return lambda: F.layer_norm(x, (8,), weight, bias)


def _relu() -> Call:
    x = _square(LOW)
    return lambda: tensorplay.relu(x)


def _add() -> Call:
    x, y = _square(LOW), _square(LOW)
    return lambda: tensorplay.add(x, y)


def _add_operator() -> Call:
    x, y = _square(LOW), _square(LOW)
    return lambda: x + y


_CALLS: dict[str, Callable[[], Call]] = {
    "mm-low": _mm_low,
    "mm-leaf": _mm_leaf,
    "mm-activations": _mm_activations,
    "matmul-operator": _matmul_operator,
    "linear": _linear,
    "prod": _prod,
    "mse-loss": _mse_loss,
    "cat": _cat,
    "layer-norm": _layer_norm,
    "relu": _relu,
    "add": _add,
    "add-operator": _add_operator,
}


def _call_work(subject: str, side: Side) -> Work:
    call, region = _CALLS[subject](), _region(side)

    def probe() -> tuple[str, float]:
        with region():
            dtype, value = _describe(call())
        # mezzo's norm is in float32 where native autocast's keeps what came.
        return ("a float" if subject == "layer-norm" else dtype), value

    return Work(_repeated(call, region), probe)


def _repeated(call: Call, region: Region) -> Callable[[int], None]:
    def loop(count: int) -> None:
        with region():
            for _ in repeat(None, count):
                call()

    return loop


# Outside of regions


def _outside_work(subject: str, side: Side) -> Work:
    x, y, layer = _square(), _square(), nn.Linear(8, 8)
    call: Call = {
        "mm": lambda: tensorplay.mm(x, y),
        "add": lambda: tensorplay.add(x, y),
        "relu": lambda: tensorplay.relu(x),
        "linear": lambda: layer(x),
    }[subject]
    if side == "mezzo":
        with _region(side)():
            call()
    return Work(_repeated(call, nullcontext), lambda: _describe(call()))


# Entering


def _enter_work(way: str, side: Side) -> Work:
    region = _region(side)
    one = region()

    def new(count: int) -> None:
        for _ in repeat(None, count):
            with region():
                pass

    def again(count: int) -> None:
        for _ in repeat(None, count):
            with one:
                pass

    def inside(count: int) -> None:
        with one:
            new(count)

    def probe() -> tuple[str, float]:
        loop(1)
        with region():
            return str(tensorplay.get_autocast_dtype("cpu")), float(tensorplay.is_autocast_enabled("cpu"))

    loop = {"new": new, "again": again, "inside": inside}[way]
    return Work(loop, probe)


_BUILDERS: dict[str, Callable[[str, Side], Work]] = {
    "layer": _layer_work,
    "call": _call_work,
    "outside": _outside_work,
    "enter": _enter_work,
}
