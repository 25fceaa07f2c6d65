"""mezzo for PyTorch: autocast with a policy one can read and change.

Example:
    >>> import torch, mezzo.torch
    >>> with mezzo.torch.autocast("cpu", dtype=torch.bfloat16):
    ...     print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    torch.bfloat16
"""

from mezzo.torch import cpu, cuda
from mezzo.torch.autocast import autocast, is_autocast_available
from mezzo.torch.functions import custom_bwd, custom_fwd
from mezzo.torch.observe import Observation, OpCall, observe
from mezzo.torch.policies import active_policy, get_default_policy, set_default_policy

__all__ = [
    "autocast",
    "is_autocast_available",
    "custom_fwd",
    "custom_bwd",
    "set_default_policy",
    "get_default_policy",
    "active_policy",
    "observe",
    "Observation",
    "OpCall",
    "cpu",
    "cuda",
]
