"""The deprecated ``torch.cpu.amp`` spelling of autocast. New code uses `mezzo.torch.autocast`."""

import torch

from mezzo.torch.deprecated import deprecated_autocast

__all__ = ["autocast"]

autocast = deprecated_autocast("cpu", torch.bfloat16)
