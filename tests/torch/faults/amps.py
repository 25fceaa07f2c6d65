"""Mezzo's autocast and scaler and PyTorch's behind one name, so that a test of a fault can run under either."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

LOW = (torch.bfloat16, torch.float16)
OTHER = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}
low_dtypes = pytest.mark.parametrize("low", LOW, ids=["bfloat16", "float16"])

TOLERANCE = {
    # Of values around one: two roundings to 8 or 11 bits in each of up to 32 summed products, and one of the result.
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-5},
    torch.float16: {"rtol": 2**-9, "atol": 2**-8},
    torch.float32: {"rtol": 2**-17, "atol": 2**-17},
}
# Numbers and choices of a scaler that PyTorch's does not have.
MEZZOS_OWN = {"min_scale", "max_scale", "max_skipped", "max_nan_backoffs", "strict", "on_overflow"}


class Amp:
    """The autocast, and the scaler, that a test runs under.

    Args:
        name: ``"mezzo"`` or ``"torch"``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        if name == "torch":
            self._module: Any = torch.amp
        else:
            import mezzo.torch

            self._module = mezzo.torch

    def region(self, low: torch.dtype = torch.bfloat16, *, policy: Any = None, **options: Any) -> Any:
        """Make a region on the CPU; PyTorch has no policies, so there ``policy`` is left out."""
        chosen = {} if policy is None or self.name == "torch" else {"policy": policy}
        return self._module.autocast("cpu", dtype=low, **chosen, **options)

    def island(self) -> AbstractContextManager[Any]:
        """Make what each of the two offers for a stretch of full precision inside a region."""
        if self.name == "torch":
            return torch.autocast("cpu", enabled=False)
        return self._module.autocast("cpu", policy="fp32")

    def float32_region(self) -> AbstractContextManager[Any]:
        """Make a region whose dtype is float32, as it is spelled on CUDA; mezzo's is a policy, the same on all devices."""
        if self.name == "torch":
            return _without_warnings(lambda: torch.autocast("cpu", dtype=torch.float32))
        return self._module.autocast("cpu", policy="fp32")

    def everywhere(self, low: torch.dtype) -> AbstractContextManager[Any]:
        """Make one region for whatever devices the tensors are on; PyTorch's code names the device it was written for."""
        if self.name == "torch":
            return _without_warnings(lambda: torch.autocast("cuda", dtype=low))
        return self._module.autocast("auto", dtype=low)

    def scaler(self, init_scale: float = 2.0**16, **options: Any) -> Any:
        """Make a scaler on the CPU; what PyTorch's does not have, such as ``min_scale``, is left out there."""
        known = {name: value for name, value in options.items() if self.name == "mezzo" or name not in MEZZOS_OWN}
        return self._module.GradScaler("cpu", init_scale, **known)

    def clip(self, scaler: Any, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Clip gradients without a word about their scale, as scripts do that forget it."""
        if self.name == "torch":
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return scaler.clip_grad_norm_(parameters, max_norm)

    def accumulating(self, scaler: Any) -> AbstractContextManager[Any]:
        """Make a window in which gradients are added up; PyTorch has none."""
        return nullcontext() if self.name == "torch" else scaler.accumulate()

    def stepping(self, scheduler: Any, scaler: Any) -> Any:
        """Make a schedule keep step with the optimizer; PyTorch leaves that to the script, which cannot know."""
        return scheduler if self.name == "torch" else self._module.SteppedScheduler(scheduler, scaler)

    def __getattr__(self, name: str) -> Any:
        # What only mezzo has is an AttributeError of torch.amp.
        return getattr(self._module, name)


def _without_warnings(make: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def off() -> bool:
    """Say whether autocast is off on the CPU."""
    return not torch.is_autocast_enabled("cpu")


def assert_near(got: Tensor, reference: Tensor, dtype: torch.dtype, computed: torch.dtype | None = None) -> None:
    """Check a result's dtype, and its values against a reference of higher precision.

    Args:
        got: The result.
        reference: What it should be, in float32 or float64.
        dtype: The result's dtype.
        computed: The lowest dtype on the way to the result; by default ``dtype``.
    """
    assert got.dtype is dtype
    assert got.shape == reference.shape
    scale = max(1.0, reference.abs().max().item())
    tolerance = TOLERANCE[computed or dtype]
    torch.testing.assert_close(
        got.double() / scale, reference.double() / scale, rtol=tolerance["rtol"], atol=tolerance["atol"]
    )
