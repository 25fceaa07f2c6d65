"""PyTorch's deprecated spellings, made once for both namespaces that have them."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from mezzo.torch.autocast import autocast
from mezzo.torch.functions import custom_bwd, custom_fwd
from mezzo.torch.scaler import GradScaler

__all__ = ["deprecated_autocast", "deprecated_custom_bwd", "deprecated_custom_fwd", "deprecated_scaler"]


def _warn(old: str, new: str) -> None:
    text = f"`mezzo.torch.{old}(args...)` is deprecated. Please use `mezzo.torch.{new}` instead."
    warnings.warn(text, FutureWarning, stacklevel=3)


def deprecated_autocast(device_type: str, default_dtype: torch.dtype) -> type[autocast]:
    """Make the ``autocast`` class of a device's namespace, with the signature that PyTorch's has.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.
        default_dtype: The dtype if the caller names none.

    Returns:
        A subclass of `mezzo.torch.autocast` that warns when it is made.
    """

    class deprecated(autocast):  # noqa: N801 - shown under PyTorch's name
        """Deprecated; use `mezzo.torch.autocast` with the device type."""

        def __init__(
            self, enabled: bool = True, dtype: torch.dtype = default_dtype, cache_enabled: bool = True
        ) -> None:
            _warn(f"{device_type}.amp.autocast", f"autocast('{device_type}', args...)")
            super().__init__(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    deprecated.__name__ = deprecated.__qualname__ = "autocast"
    deprecated.__module__ = f"mezzo.torch.{device_type}.amp"
    return deprecated


def deprecated_scaler(device_type: str) -> type[GradScaler]:
    """Make the ``GradScaler`` class of a device's namespace, with the signature that PyTorch's has.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.

    Returns:
        A subclass of `mezzo.torch.GradScaler` that warns when it is made.
    """

    class deprecated(GradScaler):  # noqa: N801 - shown under PyTorch's name
        """Deprecated; use `mezzo.torch.GradScaler` with the device type."""

        def __init__(
            self,
            init_scale: float = 2.0**16,
            growth_factor: float = 2.0,
            backoff_factor: float = 0.5,
            growth_interval: int = 2000,
            enabled: bool = True,
        ) -> None:
            _warn(f"{device_type}.amp.GradScaler", f"GradScaler('{device_type}', args...)")
            super().__init__(
                device_type,
                init_scale=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                enabled=enabled,
            )

    deprecated.__name__ = deprecated.__qualname__ = "GradScaler"
    deprecated.__module__ = f"mezzo.torch.{device_type}.amp"
    return deprecated


def deprecated_custom_fwd(fwd: Any = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """Deprecated; use `mezzo.torch.custom_fwd` with ``device_type="cuda"``.

    Args:
        fwd: As there.
        cast_inputs: As there.

    Returns:
        As there.
    """
    _warn("cuda.amp.custom_fwd", "custom_fwd(args..., device_type='cuda')")
    return custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


def deprecated_custom_bwd(bwd: Any) -> Any:
    """Deprecated; use `mezzo.torch.custom_bwd` with ``device_type="cuda"``.

    Args:
        bwd: As there.

    Returns:
        As there.
    """
    _warn("cuda.amp.custom_bwd", "custom_bwd(args..., device_type='cuda')")
    return custom_bwd(bwd, device_type="cuda")
