"""How far a result is from that of a run in float32, as one number that is always finite."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["relative_error"]


def relative_error(real: Tensor, shadow: Tensor) -> float:
    """Say how far a result is from that of a float32 run.

    Args:
        real: The result, of any shape and floating-point or complex dtype.
        shadow: The same in float32 or wider, of the same shape.

    Returns:
        The norm of the difference over the norm of the float32 result. Where the float32 result is not finite (the -inf of
        a mask) nothing is compared; a number that is Inf or NaN in the real run only is wholly lost, as if it was 0. If
        float32 gives zeros only, 1.0 unless the result is 0 too. Exactly 0.0 if what is compared is equal.

    Example:
        >>> relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
        0.1
        >>> inf = float("inf")
        >>> relative_error(torch.tensor([3.0, inf, -inf]), torch.tensor([3.0, 4.0, -inf]))
        0.8
    """
    if shadow.is_complex():
        real, shadow = torch.view_as_real(real.to(shadow.dtype)), torch.view_as_real(shadow)
    if real.dtype.itemsize == 1:  # float8 has no arithmetic
        real = real.to(shadow.dtype)
    norms = torch.stack([torch.linalg.vector_norm(real - shadow), torch.linalg.vector_norm(shadow)])
    difference, size = norms.tolist()
    if difference == 0 and torch.equal(real.to(shadow.dtype), shadow):
        return 0.0
    # Near the ends of the range the squares are not to be had in float32.
    if not (_is_safe(difference) and _is_safe(size)):
        difference, size = _careful_norms(real.double(), shadow.double())
    if size == 0:
        return float(difference > 0)
    return float(difference / size)


def _is_safe(norm: float) -> bool:
    return 1e-15 < norm < 1e15


def _careful_norms(real: Tensor, shadow: Tensor) -> tuple[float, float]:
    compared = shadow.isfinite()
    real, shadow = torch.where(compared & real.isfinite(), real, 0.0), torch.where(compared, shadow, 0.0)
    largest = max(float(real.abs().max()), float(shadow.abs().max())) if real.numel() else 0.0
    if largest == 0:
        return 0.0, 0.0
    real, shadow = real / largest, shadow / largest
    return float(torch.linalg.vector_norm(real - shadow)), float(torch.linalg.vector_norm(shadow))
