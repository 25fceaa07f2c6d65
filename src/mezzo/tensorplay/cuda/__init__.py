"""The spelling ``tensorplay.cuda.amp`` of TensorPlay's documentation; see `mezzo.tensorplay.cuda.amp`."""

from mezzo.tensorplay.cuda import amp

__all__ = ["amp"]
