"""The values of models and of their optimizers' state: casting them in place, and going back if a cast fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.torch.masters.gradients import replace_values, set_gradient
from mezzo.torch.masters.places import cast_state

__all__ = ["FLOATS", "Before", "buffers_of", "cast_in_place", "parameters_of"]

FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""What is cast, as Apex did."""


def parameters_of(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """List the parameters of models, each once."""
    return list({id(one): one for model in models for one in model.parameters()}.values())


def buffers_of(models: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Iterate the buffers of models by module and name; one that two modules share comes twice."""
    modules = {id(one): one for model in models for one in model.modules()}
    for module in modules.values():
        named = module._buffers.items()
        yield from ((module, name, one) for name, one in named if one is not None)


class Before:
    """Models and optimizers as they are now, to be put back. Nothing is copied.

    Args:
        models: The models. Their hooks are not kept.
        optimizers: The optimizers: what is in their groups, and their state.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._parameters = [(one, one.detach(), one.grad) for one in parameters_of(models)]
        self._buffers = list(buffers_of(models))
        self._places = [
            (optimizer, [list(group["params"]) for group in optimizer.param_groups], dict(optimizer.state))
            for optimizer in optimizers
        ]

    def put_back(self) -> None:
        """Put everything back."""
        for parameter, values, gradient in self._parameters:
            replace_values(parameter, values)
            set_gradient(parameter, gradient)
        for module, name, tensor in self._buffers:
            module._buffers[name] = tensor
        for optimizer, groups, state in self._places:
            for group, params in zip(optimizer.param_groups, groups, strict=True):
                group["params"][:] = params
            optimizer.state.clear()
            optimizer.state.update(state)


@torch.no_grad()
def cast_in_place(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    """Cast floating-point parameters and buffers, as ``module.to(dtype)`` does, with gradients and optimizer state.

    Parameters stay the same objects.

    Args:
        models: The models.
        optimizers: Those that hold their parameters.
        dtype: To which.
    """
    old: dict[int, torch.dtype] = {}
    for parameter in parameters_of(models):
        if parameter.dtype in FLOATS and parameter.dtype is not dtype:
            old[id(parameter)] = parameter.dtype
            gradient = parameter.grad
            replace_values(parameter, parameter.detach().to(dtype))
            set_gradient(parameter, None if gradient is None else gradient.to(dtype))
    cast: dict[int, Tensor] = {}
    for module, name, tensor in list(buffers_of(models)):
        if tensor.dtype in FLOATS and tensor.dtype is not dtype:
            cast.setdefault(id(tensor), tensor.to(dtype))
            module._buffers[name] = cast[id(tensor)]
    for optimizer in optimizers:
        state: dict[Any, Any] = optimizer.state
        for key, value in state.items():
            if id(key) in old:
                state[key] = cast_state(value, old[id(key)], dtype)
