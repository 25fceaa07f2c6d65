"""The state of `mezzo.apex.amp`: one object for the process, as in Apex, which scripts read and write.

Scripts reach it as ``amp._amp_state`` and as ``from apex.amp._amp_state import _amp_state``; both are this object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from mezzo.errors import AmpError
from mezzo.torch.masters.params import master_params as _master_params

if TYPE_CHECKING:
    from mezzo.apex.amp.loss_scaler import LossScaler
    from mezzo.apex.amp.properties import Properties

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err"]


class AmpState:
    """What ``amp.initialize`` has set. One for the process; the last call counts.

    Attributes:
        hard_override: If true, options that do not go together are printed and not raised.
        allow_incoming_model_not_fp32: If true, models in low precision are taken.
        verbosity: 0 prints nothing.
        opt_properties: The options in force; None before the first call.
        loss_scalers: One for each ``loss_id``.
        min_loss_scale: The floor of dynamic scales; None for mezzo's own.
        max_loss_scale: Their ceiling; None for none.
        handle: Of the casts of O1; None at other levels.
        initialized: Whether ``initialize`` was called with ``enabled=True``.

    Example:
        >>> from mezzo.apex import amp
        >>> amp._amp_state.verbosity
        1
    """

    hard_override: bool
    allow_incoming_model_not_fp32: bool
    verbosity: int
    opt_properties: Properties | None
    loss_scalers: list[LossScaler]
    min_loss_scale: float | None
    max_loss_scale: float | None
    handle: Any
    initialized: bool

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, as before the first ``initialize``."""
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.opt_properties = None
        self.loss_scalers = []
        self.min_loss_scale = None
        self.max_loss_scale = 2.0**24
        self.handle = None
        self.initialized = False

    @property
    def enabled(self) -> bool:
        """Whether the last ``initialize`` was one with ``enabled=True``."""
        return self.opt_properties is not None and bool(self.opt_properties.enabled)


_amp_state = AmpState()


def maybe_print(text: str, rank0: bool = False) -> None:
    """Print a line, unless ``verbosity`` is 0.

    Args:
        text: The line.
        rank0: Whether only the first of several processes prints it.
    """
    if _amp_state.verbosity <= 0:
        return
    if rank0 and dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    print(text)


def warn_or_err(text: str) -> None:
    """Raise about options that do not go together; print it if ``hard_override`` is set.

    Args:
        text: What came, what is allowed, what to do.

    Raises:
        AmpError: ``hard_override`` is not set.
    """
    if not _amp_state.hard_override:
        raise AmpError(text)
    print("Warning:  " + text)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Iterate what an optimizer updates: float32 masters (O2), and the parameters that have none.

    Args:
        optimizer: Any optimizer, initialized or not.

    Returns:
        The tensors in the order of its ``param_groups``. Their gradients are unscaled after each ``scale_loss`` block, so
        ``clip_grad_norm_(amp.master_params(optimizer), 1.0)`` clips what is stepped with.

    Example:
        >>> import torch
        >>> from mezzo.apex import amp
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        >>> [tuple(one.shape) for one in amp.master_params(optimizer)]
        [(2, 2), (2,)]
    """
    return _master_params(optimizer)
