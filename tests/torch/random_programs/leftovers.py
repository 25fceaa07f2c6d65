"""All state that a region touches, read off one by one: none of it may be left when a program ends."""

from __future__ import annotations

import torch

from mezzo.torch.active import slot_for
from mezzo.torch.cache import casts_of_thread, keeping
from mezzo.torch.tokens import THREAD

__all__ = ["leftovers"]

_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "ipu", "maia", "xla")


def leftovers() -> dict[str, object]:
    """Read the state of this thread.

    Returns:
        It, by name; two are equal if nothing has been left behind between.
    """
    torch.autocast_increment_nesting()
    found: dict[str, object] = {
        "nesting": torch.autocast_decrement_nesting(),
        "cache flag": torch.is_autocast_cache_enabled(),
        "kept casts": len(casts_of_thread()),
        "depth of keeping": keeping.depth,
        "token": THREAD.scope.token,
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "modes": torch._C._len_torch_dispatch_stack(),
    }
    for device in _DEVICES:
        slot = slot_for(device)
        found[device] = (
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C._dispatch_key_parse(f"Autocast{device.upper()}")),
            slot.active,
            torch._C._is_key_in_tls(slot.key),
        )
    return found
