"""Masters in checkpoints: saved with the optimizer's state, and taken from float32 weights that are loaded into the model.

The two state dicts of a run, the model's and the optimizer's, may be loaded in either order: what the optimizer's says
about a parameter holds as long as the model's agrees with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.errors import PreparationError

from .copies import at_attaching, owner_of
from .params import Master, master_of, state_of, take_over_writes
from .places import take_in
from .rounding import round_nearest_, split_

__all__ = ["KEY", "take_wide_values"]

KEY = "mezzo"
"""The key that an optimizer's state dict has besides PyTorch's ``state`` and ``param_groups``."""

_VERSION = 1
_PARTS = ("masters", "low", "compensation")
_to_load: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[str, Any]] = weakref.WeakKeyDictionary()


def _add_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        optimizer.register_state_dict_post_hook(_save),
        optimizer.register_load_state_dict_pre_hook(_before_load),
        optimizer.register_load_state_dict_post_hook(_after_load),
    ]


at_attaching.append(_add_hooks)


def _numbered(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Tensor]]:
    """Iterate parameters with the numbers that PyTorch gives them in a state dict."""
    yield from enumerate(one for group in optimizer.param_groups for one in group["params"])


# Saving


def _save(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    if (owner := owner_of(optimizer)) is not None:
        take_in(optimizer, owner)
    saved: dict[str, Any] = {"version": _VERSION, "rounds": 0, **{part: {} for part in _PARTS}}
    for number, one in _numbered(optimizer):
        if not isinstance(one, Master):
            continue
        settings = one.owner.settings
        with torch.no_grad():
            take_over_writes(one, look=True)
        saved["rounds"] = one.owner.rounds
        if settings.keeps_masters:
            saved["masters"][number] = one.values()
        if settings.rounds_at_random or one.compensation is not None:
            saved["low"][number] = one.model_param.detach()
        if one.compensation is not None:
            saved["compensation"][number] = one.compensation
    state_dict[KEY] = saved


# Loading


def _before_load(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Look at what is to be loaded while nothing has changed."""
    _to_load.pop(optimizer, None)
    if (owner := owner_of(optimizer)) is not None:
        take_in(optimizer, owner)
    saved = state_dict.get(KEY)
    if saved is None or not _fits(optimizer, state_dict):
        return
    if not isinstance(saved, Mapping) or saved.get("version") != _VERSION:
        version = saved.get("version") if isinstance(saved, Mapping) else type(saved).__name__
        msg = (
            f"The optimizer's state dict has masters of format {version!r}, and this version of mezzo reads {_VERSION}. "
            f"Load it with the version that saved it, or delete the key {KEY!r}: the masters are then the rounded weights."
        )
        raise PreparationError(msg)
    _check_tensors(saved, {number: tuple(one.shape) for number, one in _numbered(optimizer)})
    _to_load[optimizer] = dict(saved)


def _fits(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> bool:
    """Say whether PyTorch will load it, as far as groups go; else it raises its own error."""
    theirs = [len(group["params"]) for group in state_dict["param_groups"]]
    return theirs == [len(group["params"]) for group in optimizer.param_groups]


def _check_tensors(saved: Mapping[str, Any], shapes: dict[int, tuple[int, ...]]) -> None:
    for part in _PARTS:
        values = saved.get(part, {})
        if not isinstance(values, Mapping) or not isinstance(saved.get("rounds", 0), int):
            msg = (
                f"The optimizer's state dict has a damaged entry {KEY!r}: {part!r} maps numbers to tensors, and 'rounds' is "
                "an int. Nothing was loaded."
            )
            raise PreparationError(msg)
        for number, value in values.items():
            if not isinstance(value, Tensor):
                msg = (
                    f"The optimizer's state dict has a damaged entry {KEY!r}: {part!r} has a {type(value).__name__} where a "
                    f"tensor belongs, for parameter {number}. Nothing was loaded."
                )
                raise PreparationError(msg)
            if shapes.get(number) != tuple(value.shape):
                msg = (
                    f"The optimizer's state dict has {part} of shape {tuple(value.shape)} for parameter {number}, which "
                    f"{'does not exist' if number not in shapes else f'has shape {shapes[number]}'}. It was saved from "
                    "another model, or its optimizer was given the parameters in another order. Nothing was loaded."
                )
                raise PreparationError(msg)


@torch.no_grad()
def _after_load(optimizer: torch.optim.Optimizer) -> None:
    saved = _to_load.pop(optimizer, None)
    if saved is None:
        return
    for number, one in _numbered(optimizer):
        low, lacking = saved.get("low", {}).get(number), saved.get("compensation", {}).get(number)
        wide = saved.get("masters", {}).get(number)
        if wide is None and low is not None:
            wide = low.float() if lacking is None else low.float() + lacking.float()
        if isinstance(one, Master):
            _set(one, wide, low, lacking)
        elif wide is not None and one.dtype is torch.float32:
            one.copy_(wide)
    owner = owner_of(optimizer)
    if owner is not None:
        owner.rounds = int(saved.get("rounds", 0))


def _set(master: Master, wide: Tensor | None, low: Tensor | None, lacking: Tensor | None = None) -> None:
    """Set a master and its parameter to what a checkpoint has of them."""
    parameter = master.model_param.detach()
    # They may be this run's own, and change below.
    low, lacking = (None if each is None else each.clone() for each in (low, lacking))
    if wide is not None:
        set_values(master, wide)
    if low is not None and low.dtype is parameter.dtype:
        parameter.copy_(low)
        if lacking is None and wide is not None:
            lacking = wide.to(parameter.device) - parameter.float()
        if master.compensation is not None and lacking is not None:
            master.compensation.copy_(lacking)
    if wide is not None or low is not None:
        master.seen, master.loaded = state_of(master.model_param), None
        if master.compensation is not None or low is not None:
            master.loaded = parameter.clone()


def set_values(master: Master, wide: Tensor) -> None:
    """Set a master to float32 values, and the model's parameter to what they round to."""
    parameter = master.model_param.detach()
    wide = wide.to(parameter.device, torch.float32)
    if master.compensation is not None:
        split_([parameter], [master.compensation], [wide])
        master.loaded = parameter.clone()
        return
    if master.owner.settings.keeps_masters:
        master.values().copy_(wide)
    round_nearest_([parameter], [wide])


@torch.no_grad()
def take_wide_values(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: object
) -> None:
    """Let masters have the float32 values that are loaded into a module: a hook of its ``load_state_dict``.

    Args:
        module: It has parameters that are stored low.
        state_dict: What is loaded.
        prefix: Of the module's names in it.
        local_metadata: PyTorch's; tells of ``assign=True``.
        _: PyTorch's other arguments.

    Raises:
        PreparationError: ``assign=True``, which would put other parameters in place of those that the masters belong to.
    """
    refuse_assign(module, local_metadata)
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        master = None if parameter is None else master_of(parameter)
        if master is None or not isinstance(value, Tensor) or value.shape != master.model_param.shape:
            continue
        if value.dtype is master.model_param.dtype and master.compensation is not None:
            # What the model has already keeps its compensation.
            take_over_writes(master)
            master.loaded = master.model_param.detach().clone()
        elif value.is_floating_point() and value.dtype is not master.model_param.dtype:
            take_over_writes(master)
            set_values(master, value)
            master.seen = state_of(master.model_param)


def refuse_assign(module: nn.Module, local_metadata: Mapping[str, Any], *, held: bool = False) -> None:
    """Raise if ``load_state_dict`` was called with ``assign=True`` where an optimizer holds masters, or the parameters."""
    if not local_metadata.get("assign_to_params_buffers"):
        return
    if held or any(master_of(one) is not None for one in module.parameters()):
        msg = (
            "load_state_dict(assign=True) would replace the parameters of a prepared model, and its optimizer would go on "
            "with the old ones. Load without assign, or call mezzo.torch.unprepare first."
        )
        raise PreparationError(msg)
