"""PyTorch's deprecated ``torch.cpu.amp`` spellings; see `mezzo.torch.cpu.amp`."""

from mezzo.torch.cpu import amp

__all__ = ["amp"]
