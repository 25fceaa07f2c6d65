"""The spelling ``tensorplay.cpu.amp`` of TensorPlay's documentation; see `mezzo.tensorplay.cpu.amp`."""

from mezzo.tensorplay.cpu import amp

__all__ = ["amp"]
