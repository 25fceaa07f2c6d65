"""Small training runs that the tests of `prepare` compare, and a snapshot of all there is to a model and its optimizers."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import mezzo.torch
from mezzo.torch.masters.params import Master

LOW = torch.bfloat16
Optimizer = torch.optim.Optimizer
Pair = tuple[nn.Module, Optimizer]

SETTINGS: dict[str, dict[str, Any]] = {
    "masters": {},
    "masters-stochastic": {"rounding": "stochastic", "seed": 3},
    "masters-float32-gradients": {"grad_dtype": torch.float32},
    "masters-low-gradients": {"grad_dtype": LOW},
    "kahan": {"masters": "kahan"},
    "kahan-stochastic": {"masters": "kahan", "rounding": "stochastic", "seed": 3},
    "none": {"masters": False},
    "none-stochastic": {"masters": False, "rounding": "stochastic", "seed": 3},
}
"""All kinds of storage that `prepare` offers."""

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 3))


def run(weights: int = 0, optimizer: str = "adamw", **options: Any) -> tuple[nn.Sequential, Optimizer]:
    """Give a prepared model and its optimizer, before the first step."""
    model = net(weights)
    made: tuple[nn.Sequential, Optimizer] = mezzo.torch.prepare(
        model, OPTIMIZERS[optimizer](model.parameters()), **options
    )
    return made


def unprepared(optimizer: str = "adamw", weights: int = 0) -> Pair:
    model = net(weights)
    return model, OPTIMIZERS[optimizer](model.parameters())


def batch(number: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(number))


def train(model: nn.Module, optimizer: Optimizer, steps: int, first: int = 0, backwards: int = 2) -> list[float]:
    """Train with several backward passes per step, so that gradients are sums; give the losses."""
    losses = []
    for number in range(first, first + steps):
        optimizer.zero_grad()
        for part in range(backwards):
            with mezzo.torch.autocast("cpu", dtype=LOW):
                loss = model(batch(10 * number + part)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def is_prepared(optimizer: Optimizer) -> bool:
    return any(isinstance(one, Master) for group in optimizer.param_groups for one in group["params"])


def read_back(pair: Pair) -> dict[str, Any]:
    """Save a run and read it back, as untrusted files are read."""
    file = io.BytesIO()
    torch.save({"model": pair[0].state_dict(), "optimizer": pair[1].state_dict()}, file)
    found: dict[str, Any] = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    return found


def load(pair: Pair, saved: dict[str, Any], order: str = "model optimizer") -> None:
    for each in order.split():
        (pair[0] if each == "model" else pair[1]).load_state_dict(saved[each])


def tensors(model: nn.Module, *optimizers: Optimizer) -> dict[str, Tensor]:
    """Give copies of all tensors of a run: weights, buffers, gradients, masters, compensations and optimizer state."""
    found = {f"model.{name}": each for name, each in model.state_dict().items()}
    found |= {f"grad.{name}": each.grad for name, each in model.named_parameters() if each.grad is not None}
    for place, optimizer in enumerate(optimizers):
        held = [one for group in optimizer.param_groups for one in group["params"]]
        for number, one in enumerate(held):
            found[f"{place}.{number}"] = one.detach()
            if isinstance(one, Master) and one.compensation is not None:
                found[f"{place}.{number}.compensation"] = one.compensation
            for key, value in optimizer.state.get(one, {}).items():
                if isinstance(value, Tensor):
                    found[f"{place}.{number}.{key}"] = value
    return {name: each.detach().clone() for name, each in found.items()}


def same(first: Any, second: Any) -> bool:
    """Say whether two nests are alike in structure, dtypes and bits; NaN is like NaN."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.dtype is not second.dtype or first.shape != second.shape:
            return False
        return torch.equal(first.isnan(), second.isnan()) and torch.equal(first.nan_to_num(), second.nan_to_num())
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Name what differs between two dicts: shown by a failed assertion."""
    return [key for key in {**first, **second} if not same(first.get(key), second.get(key))]


def snapshot(model: nn.Module, *optimizers: Optimizer) -> dict[str, Any]:
    """Give all there is to a model and its optimizers: identities, attributes, hooks, dtypes, gradients and values."""
    found: dict[str, Any] = dict(tensors(model, *optimizers))
    for path, module in model.named_modules():
        found[f"module {path!r}"] = _shallow(vars(module))
    for name, one in model.named_parameters():
        found[f"parameter {name!r}"] = (id(one), one.dtype, one.grad_dtype, one.requires_grad, id(one.grad), vars(one))
        found[f"address {name!r}"] = one.data_ptr()
        found[f"tensor hooks {name!r}"] = len(one._backward_hooks or ())
    for place, optimizer in enumerate(optimizers):
        found[f"optimizer {place}"] = {
            name: _shallow(value) if isinstance(value, dict) else id(value)
            for name, value in vars(optimizer).items()
            if name not in ("param_groups", "state")
        }
        found[f"groups {place}"] = [
            {key: [id(one) for one in value] if key == "params" else value for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        found[f"state {place}"] = {
            id(key): {name: id(each) for name, each in value.items()} for key, value in optimizer.state.items()
        }
    return found


def _shallow(attributes: dict[Any, Any]) -> dict[Any, Any]:
    return {
        name: {key: id(each) for key, each in value.items()} if isinstance(value, dict) else id(value)
        for name, value in attributes.items()
    }
