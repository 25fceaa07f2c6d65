"""The deprecated ``torch.cpu.amp`` spellings. New code uses `mezzo.torch.autocast` and `mezzo.torch.GradScaler`."""

import torch

from mezzo.torch.deprecated import deprecated_autocast, deprecated_scaler

__all__ = ["GradScaler", "autocast"]

autocast = deprecated_autocast("cpu", torch.bfloat16)
GradScaler = deprecated_scaler("cpu")
