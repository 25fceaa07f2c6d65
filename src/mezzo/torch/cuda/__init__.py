"""PyTorch's deprecated ``torch.cuda.amp`` spellings; see `mezzo.torch.cuda.amp`."""

from mezzo.torch.cuda import amp

__all__ = ["amp"]
