"""In the place of `apex.normalization`: PyTorch's layer and RMS norms, under Apex's names and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mezzo.errors import AmpError

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]

Shape = int | Sequence[int]


class FusedLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` under the arguments of Apex's.

    Args:
        normalized_shape: The shape of the last dimensions, over which to normalize.
        eps: Added to the variance.
        elementwise_affine: Whether to have a weight and a bias.
        memory_efficient: No effect.

    Example:
        >>> import torch
        >>> from mezzo.apex.normalization import FusedLayerNorm
        >>> FusedLayerNorm(2)(torch.tensor([[1.0, 3.0]])).detach().round()
        tensor([[-1.,  1.]])
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        *,
        memory_efficient: bool = False,
    ) -> None:
        del memory_efficient
        super().__init__(_listed(normalized_shape), eps, elementwise_affine)


class FusedRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` under the arguments of Apex's.

    Args:
        normalized_shape: The shape of the last dimensions, over which to normalize.
        eps: Added to the mean of the squares.
        elementwise_affine: Whether to have a weight.
        memory_efficient: No effect.

    Example:
        >>> import torch
        >>> from mezzo.apex.normalization import FusedRMSNorm
        >>> FusedRMSNorm(2)(torch.tensor([[3.0, -3.0]])).detach().round()
        tensor([[ 1., -1.]])
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        del memory_efficient
        super().__init__(_listed(normalized_shape), eps, elementwise_affine)


class MixedFusedLayerNorm(FusedLayerNorm):
    """A layer norm whose result has the dtype of its weight, whatever comes in.

    Args:
        normalized_shape: The shape of the last dimensions, over which to normalize.
        eps: Added to the variance.
        **options: ``memory_efficient``, without effect, and ``elementwise_affine``, which is True here.

    Raises:
        AmpError: ``elementwise_affine`` is False, so there is no weight to take the dtype of.

    Example:
        >>> import torch
        >>> from mezzo.apex.normalization import MixedFusedLayerNorm
        >>> MixedFusedLayerNorm(4)(torch.ones(1, 4, dtype=torch.float16)).dtype
        torch.float32
    """

    def __init__(self, normalized_shape: Shape, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(normalized_shape, eps, **_affine(type(self), options))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - PyTorch's name
        """Normalize in the dtype of the weight.

        Args:
            input: Floating, of shape ``(..., *normalized_shape)``.

        Returns:
            A tensor of the same shape in the dtype of the weight.
        """
        return super().forward(input.to(self.weight.dtype))


class MixedFusedRMSNorm(FusedRMSNorm):
    """An RMS norm whose result has the dtype of its weight, whatever comes in.

    Args:
        normalized_shape: The shape of the last dimensions, over which to normalize.
        eps: Added to the mean of the squares.
        **options: ``memory_efficient``, without effect, and ``elementwise_affine``, which is True here.

    Raises:
        AmpError: ``elementwise_affine`` is False, so there is no weight to take the dtype of.

    Example:
        >>> import torch
        >>> from mezzo.apex.normalization import MixedFusedRMSNorm
        >>> MixedFusedRMSNorm(4)(torch.ones(1, 4, dtype=torch.float16)).dtype
        torch.float32
    """

    def __init__(self, normalized_shape: Shape, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(normalized_shape, eps, **_affine(type(self), options))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize in the dtype of the weight.

        Args:
            x: Floating, of shape ``(..., *normalized_shape)``.

        Returns:
            A tensor of the same shape in the dtype of the weight.
        """
        return super().forward(x.to(self.weight.dtype))


def _listed(shape: Shape) -> int | list[int]:
    return shape if isinstance(shape, int) else list(shape)


def _affine(kind: type[nn.Module], options: dict[str, Any]) -> dict[str, Any]:
    if not options.get("elementwise_affine", True):
        msg = (
            f"{kind.__name__} gives results in the dtype of its weight, so elementwise_affine=False is not there. "
            f"{kind.__name__.removeprefix('Mixed')} has it."
        )
        raise AmpError(msg)
    return options
