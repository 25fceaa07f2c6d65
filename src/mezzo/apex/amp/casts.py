"""O1 on mezzo's autocast: started once, on in every thread that trains, off for backward passes and steps.

The parts are in `cast_regions` (which thread is in), `cast_switches` (off and on again), `watched_models` (models that have
their thread enter) and `cast_handle`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mezzo.apex.amp import registered
from mezzo.apex.amp.cast_handle import Handle, NoHandle
from mezzo.apex.amp.cast_regions import begin, end, ensure_here
from mezzo.apex.amp.cast_state import Started
from mezzo.apex.amp.cast_switches import casts_active, disable_casts, off_during, on_after, with_casts, without_casts
from mezzo.apex.amp.watched_models import forget_weight_casts, watch_model
from mezzo.builtin import builtin_policy
from mezzo.errors import AmpOptionError
from mezzo.rules import RuleLike

__all__ = [
    "Handle",
    "casts_active",
    "disable_casts",
    "ensure_here",
    "forget_weight_casts",
    "init",
    "off_during",
    "on_after",
    "start",
    "stop",
    "watch_model",
    "with_casts",
    "without_casts",
]

_BANNED = ("binary_cross_entropy",)


def start(
    device_types: Sequence[str],
    dtype: torch.dtype,
    rules: Mapping[str, RuleLike],
    *,
    allow_banned: bool = False,
    enable_caching: bool = True,
) -> Handle:
    """Start O1: listed ops are cast from now on, wherever this thread calls them.

    The thread enters an autocast region with the policy ``"apex-o1"`` and stays in it; others do so when they call a model
    under `watch_model`, or `ensure_here`. An earlier start is ended.

    Args:
        device_types: On which devices ops are cast, ``["cuda"]``. Tensors elsewhere are left alone.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        rules: Op names to cast policies, over those of Apex; what `registered.take_registrations` gives.
        allow_banned: Whether ``binary_cross_entropy`` runs in float32 instead of raising.
        enable_caching: Whether a weight is cast once per ``forward`` of a watched model, and not at each use.

    Returns:
        A handle.

    Raises:
        AmpOptionError: There is no device type, or ``dtype`` is another one.
        RuntimeError: A device type is none or has no autocast.
        UnknownOpError: A rule names no op.

    Start it outside of other regions. In one that ends before O1 does, PyTorch puts back the state before that region, and
    casts are off until the thread asks again: at the next ``forward`` of a watched model, or `ensure_here`. `stop` then
    leaves what that region has put back. What cannot be mended: a region that is open when `stop` is called puts O1's state
    back when it ends.

    Example:
        >>> handle = start(["cpu"], torch.bfloat16, {})
        >>> (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
        >>> stop()
    """
    devices = tuple(dict.fromkeys(device_types))
    if not devices or isinstance(device_types, str):
        msg = f"casts need a list of device types such as ['cuda'], got {device_types!r}."
        raise AmpOptionError(msg)
    if dtype not in (torch.float16, torch.bfloat16):
        msg = f"O1 computes in torch.float16 or torch.bfloat16, got {dtype!r}."
        raise AmpOptionError(msg)
    policy = builtin_policy("apex-o1")
    changes = {**(dict.fromkeys(_BANNED, "fp32") if allow_banned else {}), **rules}
    if changes:
        policy = policy.override(changes)
    new = Started(devices, dtype, policy, keeps_casts=enable_caching)
    begin(new)
    return Handle(new)


def stop() -> None:
    """End O1, in this thread at once and in others when they call a watched model or `ensure_here` next.

    PyTorch's state is then as it was before O1; see `start` for regions that were opened or ended meanwhile.
    """
    end()


def init(
    enabled: bool = True,
    loss_scale: str | float = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> Handle:
    """Start O1 without a model, as scripts for the first version of Apex do; new ones call ``amp.initialize``.

    Args:
        enabled: False gives a handle that does nothing.
        loss_scale: Taken and not used, as in Apex: scaling is a matter of ``amp.scale_loss``.
        enable_caching: Whether a weight is cast once per ``forward`` of a watched model.
        verbose: Taken and not used; `mezzo.torch.observe` shows the casts.
        allow_banned: Whether ``binary_cross_entropy`` runs in float32 instead of raising.

    Returns:
        The handle. Casts are to float16, on the current accelerator if there is one, and on the CPU.

    Example:
        >>> from mezzo.apex import amp
        >>> handle = amp.init()
        >>> (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float16
        >>> handle._deactivate()
    """
    del loss_scale, verbose
    if not enabled:
        return NoHandle()
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu"]
    if accelerator is not None and torch.amp.is_autocast_available(accelerator.type):
        devices.insert(0, accelerator.type)
    rules = registered.take_registrations()
    handle = start(devices, torch.float16, rules, allow_banned=allow_banned, enable_caching=enable_caching)
    registered.close()
    return handle
