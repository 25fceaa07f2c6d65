"""In the place of `apex.optimizers`: PyTorch's optimizers under Apex's names and arguments.

On a GPU they use PyTorch's fused kernels, as Apex's used its own. On a CPU Adam does; SGD does not, because PyTorch's fused
SGD leaves float16 and bfloat16 parameters as they are there (PyTorch issue 191763).
"""

from mezzo.apex.optimizers.fused_adagrad import FusedAdagrad
from mezzo.apex.optimizers.fused_adam import FusedAdam
from mezzo.apex.optimizers.fused_sgd import FusedSGD
from mezzo.apex.optimizers.missing import FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]
