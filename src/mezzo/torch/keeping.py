"""`keep_casts`: casts of weights that outlive a region."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mezzo.torch.cache import forget_native_casts, keeping

__all__ = ["keep_casts"]


@contextmanager
def keep_casts() -> Iterator[None]:
    """Keep the casts of weights from one region to the next, as long as the weights stay what they are.

    A region drops them at its end, so each batch casts every weight again. Around a loop of inferences, or over the
    micro-batches of one accumulated gradient, that is work for nothing. Inside this block casts are made once, and anew when
    a weight has changed: every optimizer step drops all, and a change in place, another storage (``p.data = ...``) or
    ``load_state_dict`` is seen at the next use. ``torch.clear_autocast_cache()`` drops them too, and the end of the block.

    Not seen, by PyTorch's design, are writes through another tensor on the same memory, such as ``p.data.add_(1)``: call
    ``torch.clear_autocast_cache()`` after them.

    It concerns regions of mezzo's whose policy has repairs, which the default one has. A plain ``torch.autocast`` region, or
    one with the policy ``"torch"``, keeps its casts for the length of the block too, and, as PyTorch does, without a look at
    the weights.

    The block is for its thread, and holds a low-precision copy of each weight used, half the size of the float32 weights. It
    may be nested, and used as a decorator.

    Yields:
        Nothing.

    Example:
        >>> import torch
        >>> from mezzo.torch import autocast, keep_casts
        >>> linear = torch.nn.Linear(8, 8)
        >>> with torch.inference_mode(), keep_casts():
        ...     for batch in torch.ones(3, 2, 8):
        ...         with autocast("cpu", dtype=torch.bfloat16):
        ...             output = linear(batch)
        >>> output.dtype
        torch.bfloat16
    """
    # Regions drop the casts when they are the outermost ones, which they are not in here.
    torch.autocast_increment_nesting()
    keeping.depth += 1
    try:
        yield
    finally:
        keeping.depth -= 1
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        else:
            # A plain region in the block may have had weights cast, of which nothing is written down.
            forget_native_casts()
