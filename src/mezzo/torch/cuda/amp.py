"""The deprecated ``torch.cuda.amp`` spellings of autocast. New code uses `mezzo.torch.autocast`."""

import torch

from mezzo.torch.deprecated import deprecated_autocast
from mezzo.torch.deprecated import deprecated_custom_bwd as custom_bwd
from mezzo.torch.deprecated import deprecated_custom_fwd as custom_fwd

__all__ = ["autocast", "custom_bwd", "custom_fwd"]

autocast = deprecated_autocast("cuda", torch.float16)
