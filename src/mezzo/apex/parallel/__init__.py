"""In the place of `apex.parallel`: PyTorch's DistributedDataParallel and SyncBatchNorm under Apex's arguments, and LARC.

Example:
    >>> import torch
    >>> from mezzo.apex.parallel import convert_syncbn_model
    >>> type(convert_syncbn_model(torch.nn.BatchNorm2d(4))).__name__
    'SyncBatchNorm'
"""

from mezzo.apex.parallel.distributed import DistributedDataParallel
from mezzo.apex.parallel.larc import LARC
from mezzo.apex.parallel.reducer import Reducer
from mezzo.apex.parallel.sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

__all__ = [
    "DistributedDataParallel",
    "LARC",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
