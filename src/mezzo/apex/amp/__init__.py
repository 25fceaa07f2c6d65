"""``apex.amp`` on mezzo: mixed precision by levels, for scripts written for NVIDIA's Apex.

Example:
    >>> import torch
    >>> from mezzo.apex import amp
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    >>> loss = model(torch.ones(3, 4)).square().mean()
    >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
    ...     scaled_loss.backward()
    >>> optimizer.step()
"""

from mezzo.apex.amp._amp_state import _amp_state, master_params
from mezzo.apex.amp.casts import disable_casts, init
from mezzo.apex.amp.checkpoints import load_state_dict, state_dict
from mezzo.apex.amp.frontend import initialize
from mezzo.apex.amp.registered import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from mezzo.apex.amp.scaled_losses import scale_loss

__all__ = [
    "initialize",
    "scale_loss",
    "master_params",
    "state_dict",
    "load_state_dict",
    "half_function",
    "float_function",
    "promote_function",
    "register_half_function",
    "register_float_function",
    "register_promote_function",
    "disable_casts",
    "init",
    "_amp_state",
]
