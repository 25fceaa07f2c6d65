"""In the place of `apex.multi_tensor_apply`, whose kernels there are none of: scripts ask whether they are available."""

from __future__ import annotations

from typing import NoReturn

from mezzo.errors import AmpError

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Says that there are no kernels.

    Args:
        chunk_size: No effect.

    Attributes:
        available: False.

    Example:
        >>> from mezzo.apex.multi_tensor_apply import multi_tensor_applier
        >>> multi_tensor_applier.available
        False
    """

    available = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise.

        Args:
            *args: No effect.
            **kwargs: No effect.

        Raises:
            AmpError: Always; it names what PyTorch has.
        """
        del args, kwargs
        msg = (
            "multi_tensor_applier runs kernels of Apex's extension amp_C, which mezzo does not have; ask for "
            "multi_tensor_applier.available first. PyTorch has torch._foreach_mul_, torch._foreach_add_, "
            "torch._foreach_norm and others, and torch.nn.utils.get_total_norm."
        )
        raise AmpError(msg)


multi_tensor_applier = MultiTensorApply(2048 * 32)
