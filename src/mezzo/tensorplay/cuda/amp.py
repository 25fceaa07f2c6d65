"""``tensorplay.cuda.amp.autocast``, as TensorPlay's documentation uses it; TensorPlay 1.0 itself does not have it."""

from __future__ import annotations

from typing import Any

import tensorplay

from mezzo.builtin import PolicyLike
from mezzo.tensorplay.autocast import autocast as region

__all__ = ["autocast"]


class autocast(region):  # noqa: N801 - TensorPlay's name
    """A region on CUDA: `mezzo.tensorplay.autocast` with the device type filled in.

    Args:
        enabled: False makes a region in which nothing is cast.
        dtype: ``tensorplay.bfloat16`` or ``tensorplay.float16``.
        cache_enabled: Whether the casts of large weights are kept for the length of the outermost region.
        policy: As there.

    Example:
        >>> import tensorplay
        >>> from mezzo.tensorplay.cuda.amp import autocast
        >>> autocast(enabled=False)
        autocast('cuda', dtype=tensorplay.float16, enabled=False)
    """

    def __init__(
        self,
        enabled: bool = True,
        dtype: Any = tensorplay.float16,
        cache_enabled: bool = True,
        *,
        policy: PolicyLike | None = None,
    ) -> None:
        super().__init__("cuda", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled, policy=policy)
