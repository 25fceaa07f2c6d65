"""The optimizers of Apex's that mezzo does not have: there to be imported and asked for, not to be made."""

from __future__ import annotations

import torch

from mezzo.errors import AmpError

__all__ = ["FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad"]


class _Missing(torch.optim.Optimizer):
    """An optimizer of Apex's that mezzo does not have: there to be imported and asked for, not to be made."""

    instead: str

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs
        msg = (
            f"mezzo has no {type(self).__name__}. {self.instead}; a LARC around SGD (apex.parallel.LARC) and "
            "torch.optim.AdamW are other choices for large batches. An installed Apex with its CUDA extensions has it."
        )
        raise AmpError(msg)


class FusedLAMB(_Missing):
    """Not there: raises `mezzo.errors.AmpError` when it is made, and names alternatives.

    Example:
        >>> from mezzo.apex.optimizers import FusedLAMB
        >>> FusedLAMB([])
        Traceback (most recent call last):
            ...
        mezzo.errors.AmpError: mezzo has no FusedLAMB. ...
    """

    instead = "timm.optim.Lamb and the package torch-optimizer have a LAMB, which amp.initialize takes"


class FusedMixedPrecisionLamb(_Missing):
    """Not there: raises `mezzo.errors.AmpError` when it is made, and names alternatives."""

    instead = (
        "timm.optim.Lamb and the package torch-optimizer have a LAMB; amp.initialize with opt_level='O2' gives it float32 "
        "masters"
    )


class FusedNovoGrad(_Missing):
    """Not there: raises `mezzo.errors.AmpError` when it is made, and names alternatives."""

    instead = "timm.optim.NvNovoGrad and the package torch-optimizer have a NovoGrad, which amp.initialize takes"
