"""How masters come into an optimizer: in the places of parameters, with their state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mezzo.errors import PreparationError

from .params import Master, make_master, master_of, masters_in, no_values, state_of
from .settings import Owner

__all__ = ["cast_state", "give_places", "new_master", "swap", "take_in"]


def new_master(parameter: nn.Parameter, owner: Owner, data: Tensor | None = None) -> Master:
    """Make the master of a parameter that is stored low.

    Args:
        parameter: The parameter.
        owner: What it shares with the others.
        data: The float32 values, where there are any; else they are the parameter's.

    Returns:
        The master.
    """
    settings = owner.settings
    low = parameter.detach()
    if settings.keeps_masters:
        master = make_master(low.to(torch.float32) if data is None else data, parameter, owner)
    else:
        lacking = None
        if settings.masters == "kahan":
            lacking = torch.zeros_like(low) if data is None else (data - low).to(low.dtype)
        master = make_master(no_values(low), parameter, owner, lacking)
        if lacking is not None:
            master.loaded = low.clone()
    master.seen = state_of(parameter)
    return master


def swap(optimizer: torch.optim.Optimizer, group: dict[str, Any], place: int, new: Any) -> None:
    """Put a tensor in another's place in an optimizer, with its state in the dtype that goes with it."""
    old = group["params"][place]
    group["params"][place] = new
    if old in optimizer.state:
        optimizer.state[new] = cast_state(optimizer.state.pop(old), old.dtype, new.dtype)


def cast_state(state: Any, old: torch.dtype, new: torch.dtype) -> Any:
    """Give the state of one parameter with its tensors of one dtype in another, as PyTorch's ``load_state_dict`` would."""
    if isinstance(state, Tensor):
        return state.to(new) if state.dtype is old else state
    if isinstance(state, dict):
        # The count of steps is float32 whatever the parameter is.
        return {key: value if key == "step" else cast_state(value, old, new) for key, value in state.items()}
    if isinstance(state, list | tuple) and not hasattr(state, "_fields"):
        return type(state)(cast_state(each, old, new) for each in state)
    return state


def take_in(optimizer: torch.optim.Optimizer, owner: Owner) -> None:
    """Give masters to the low-precision parameters that came by ``add_param_group``.

    Raises:
        PreparationError: One of them has a master in the optimizer already.
    """
    new = [
        (group, place, one)
        for group in optimizer.param_groups
        for place, one in enumerate(group["params"])
        if one.dtype is owner.settings.dtype and not isinstance(one, Master)
    ]
    if not new:
        return
    there = set(map(id, masters_in(optimizer)))
    known = [master_of(one) for _, _, one in new]
    twice = next((one for one in known if one is not None and id(one) in there), None)
    if twice is not None or len({id(one) for _, _, one in new}) < len(new):
        shape = "" if twice is None else f", such as one of shape {tuple(twice.model_param.shape)}"
        msg = (
            f"some parameters appear in more than one parameter group{shape}: they were added by add_param_group, and their "
            "masters are in another group. Take them out of one."
        )
        raise PreparationError(msg)
    for (group, place, one), master in zip(new, known, strict=True):
        swap(optimizer, group, place, new_master(one, owner) if master is None else master)


def give_places(
    optimizer: torch.optim.Optimizer, owner: Owner, stored: dict[int, tuple[nn.Parameter, Tensor | None]]
) -> None:
    """Put masters in the places of parameters that are stored low.

    Args:
        optimizer: The optimizer.
        owner: What the masters share.
        stored: By identity the parameters, and their values before.
    """
    for group in optimizer.param_groups:
        for place, one in enumerate(group["params"]):
            if id(one) in stored:
                parameter, values = stored[id(one)]
                master = master_of(parameter)
                if master is None:
                    master = new_master(parameter, owner, None if values is None else values.to(torch.float32))
                swap(optimizer, group, place, master)
