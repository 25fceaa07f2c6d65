"""Small runs that the scaler's tests share: parameters, optimizers, and iterations with gradients of one's choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorplay as tp

from mezzo.tensorplay import GradScaler

__all__ = ["FACTORS", "OPTIMIZERS", "bits", "iterate", "make", "parameter", "snapshot"]

FACTORS = {"F": 1.0, "I": math.inf, "N": math.nan}
"""What a loss is multiplied by, so that its gradients are Finite, Inf or NaN."""

Optimizer = Callable[[list[Any]], Any]

OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": lambda params: tp.optim.SGD(params, lr=0.125),
    "SGD momentum": lambda params: tp.optim.SGD(params, lr=0.125, momentum=0.5),
    "Adam": lambda params: tp.optim.Adam(params, lr=0.125),
    "AdamW": lambda params: tp.optim.AdamW(params, lr=0.125, weight_decay=0.1),
    "Adagrad": lambda params: tp.optim.Adagrad(params, lr=0.125),
    "RMSprop": lambda params: tp.optim.RMSprop(params, lr=0.125),
    "fused SGD": lambda params: tp.optim.SGD(params, lr=0.125, fused=True),
    "fused SGD momentum": lambda params: tp.optim.SGD(params, lr=0.125, momentum=0.5, fused=True),
    "fused Adam": lambda params: tp.optim.Adam(params, lr=0.125, fused=True),
    "fused Adagrad": lambda params: tp.optim.Adagrad(params, lr=0.125, fused=True),
    "fused AdamW": lambda params: tp.optim.AdamW(params, lr=0.125, weight_decay=0.1, fused=True),
}


def parameter(*values: float, dtype: Any = tp.float32) -> Any:
    return tp.nn.Parameter(tp.tensor(list(values)).to(dtype))


def make(name: str, *values: float, dtype: Any = tp.float32) -> tuple[Any, Any]:
    weight = parameter(*(values or (1.0, -2.0, 3.0)), dtype=dtype)
    return weight, OPTIMIZERS[name]([weight])


def iterate(scaler: Any, optimizer: Any, weight: Any, factor: float = 1.0) -> None:
    """Run one iteration whose gradient is ``factor`` times two times the weight."""
    optimizer.zero_grad()
    scaler.scale((weight * weight).sum() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


def bits(value: Any) -> Any:
    """Give a value with its tensors as lists, to be compared to the bit; of NaN there are none where this is used."""
    if isinstance(value, tp.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().tolist()
    if isinstance(value, dict):
        return {key if isinstance(key, str) else id(key): bits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    return value


def snapshot(optimizer: Any) -> Any:
    """Give all that a step of an optimizer may change."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    params = [one for group in optimizer.param_groups for one in group["params"]]
    return bits([params, dict(optimizer.state), groups])


def scaler_of(**numbers: Any) -> GradScaler:
    return GradScaler("cpu", **numbers)
