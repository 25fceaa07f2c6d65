"""The scales in a checkpoint: ``amp.state_dict`` and ``amp.load_state_dict``, in Apex's format."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from mezzo.apex.amp._amp_state import _amp_state, maybe_print
from mezzo.apex.amp.loss_scaler import LossScaler
from mezzo.errors import AmpError
from mezzo.torch.masters.params import rebuild_master
from mezzo.torch.masters.settings import Owner, Settings

__all__ = ["load_state_dict", "state_dict"]

# Scripts save list(amp.master_params(optimizer)) in their checkpoints, and load these before `initialize`. torch.load takes
# by itself only what it knows; masters are tensors and what `prepare` was told.
torch.serialization.add_safe_globals([rebuild_master, Owner, Settings])


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Give the scales, for a checkpoint, in Apex's format.

    Masters are in ``optimizer.state_dict()``, so models, optimizers and this resume a run exactly, loaded in any order after
    ``amp.initialize``.

    Args:
        destination: A mapping to write to; None for a new one.

    Returns:
        ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}``; empty after ``enabled=False``.

    Raises:
        AmpError: Before ``amp.initialize``.

    Example:
        >>> import torch
        >>> from mezzo.apex import amp
        >>> _ = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", num_losses=2, verbosity=0)
        >>> dict(amp.state_dict())["loss_scaler1"]
        {'loss_scale': 65536.0, 'unskipped': 0}
    """
    found = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_scalers_in_force("state_dict")):
        found[f"loss_scaler{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return found


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load scales from a checkpoint, of Apex or of this module.

    Each goes to the scaler that its key names. If there are more scalers than entries, the others keep their scales; entries
    for which there is no scaler are left out. Either prints a line. After ``enabled=False`` nothing is done.

    Args:
        state_dict: What ``amp.state_dict()`` gave.

    Raises:
        AmpError: Before ``amp.initialize``; or keys or values that are no scaler's. No scale is changed then.

    Example:
        >>> import torch
        >>> from mezzo.apex import amp
        >>> _ = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
        >>> amp.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}})
        >>> amp._amp_state.loss_scalers[0].loss_scale()
        1024.0
    """
    scalers = _scalers_in_force("load_state_dict")
    if not _amp_state.enabled:
        return
    entries = _entries(state_dict)
    if len(entries) != len(scalers):
        maybe_print(
            f"Warning: amp.load_state_dict got {len(entries)} loss scaler(s), and amp.initialize made {len(scalers)}.",
            rank0=True,
        )
    for index, (scale, unskipped) in entries.items():
        if index >= len(scalers):
            maybe_print(f"Skipping loss_scaler{index} of the checkpoint: there is no such scaler.", rank0=True)
            continue
        scalers[index]._loss_scale, scalers[index]._unskipped = scale, unskipped


def _scalers_in_force(caller: str) -> list[LossScaler]:
    if _amp_state.opt_properties is None:
        msg = f"amp.{caller} was called before amp.initialize, which makes the loss scalers. Call amp.initialize first."
        raise AmpError(msg)
    return _amp_state.loss_scalers if _amp_state.enabled else []


def _entries(state_dict: Mapping[str, Any]) -> dict[int, tuple[float, int]]:
    """Check a checkpoint's entries before any is used."""
    if not isinstance(state_dict, Mapping):
        msg = f"amp.load_state_dict takes what amp.state_dict() gave, a mapping; got {type(state_dict).__name__}."
        raise AmpError(msg)
    found: dict[int, tuple[float, int]] = {}
    unexpected = []
    for key, value in state_dict.items():
        number = str(key).removeprefix("loss_scaler")
        if number == str(key) or not number.isdecimal() or number != str(int(number)):
            unexpected.append(key)
            continue
        try:
            scale = LossScaler(float(value["loss_scale"]), max_loss_scale=None).loss_scale()
            found[int(number)] = scale, _count(value["unskipped"])
        except (KeyError, TypeError, ValueError) as error:
            msg = (
                f"amp.load_state_dict got {value!r} for {key!r} ({type(error).__name__}: {error}). An entry is "
                "{'loss_scale': 65536.0, 'unskipped': 0}."
            )
            raise AmpError(msg) from None
    if unexpected:
        names = ", ".join(map(repr, unexpected))
        msg = (
            f"amp.load_state_dict got unexpected keys: {names}. Allowed are loss_scaler0, loss_scaler1 and so on. If these "
            "are parts of a whole checkpoint, pass checkpoint['amp']."
        )
        raise AmpError(msg)
    return found


def _count(number: Any) -> int:
    count = int(number)
    if count < 0:
        msg = "a count is not negative"
        raise ValueError(msg)
    return count
