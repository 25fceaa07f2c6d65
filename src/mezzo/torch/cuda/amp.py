"""The deprecated ``torch.cuda.amp`` spellings. New code uses `mezzo.torch.autocast` and `mezzo.torch.GradScaler`."""

import torch

from mezzo.torch.deprecated import deprecated_autocast, deprecated_scaler
from mezzo.torch.deprecated import deprecated_custom_bwd as custom_bwd
from mezzo.torch.deprecated import deprecated_custom_fwd as custom_fwd

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]

autocast = deprecated_autocast("cuda", torch.float16)
GradScaler = deprecated_scaler("cuda")
