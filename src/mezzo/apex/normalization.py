"""In the place of `apex.normalization`: PyTorch's layer and RMS norms, under Apex's names and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from mezzo.errors import AmpError

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
]

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


# As functions, for scripts that call these.


def fused_layer_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6) -> Tensor:  # noqa: A002 - PyTorch's name
    """Normalize over the last dimensions, without weight and bias.

    Args:
        input: Floating, of shape ``(..., *normalized_shape)``.
        normalized_shape: The shape of the last dimensions.
        eps: Added to the variance.

    Example:
        >>> import torch
        >>> fused_layer_norm(torch.tensor([[1.0, 3.0]]), 2).round()
        tensor([[-1.,  1.]])
    """
    return functional.layer_norm(input, _shape(normalized_shape), eps=eps)


def fused_layer_norm_affine(
    input: Tensor,  # noqa: A002 - PyTorch's name
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
) -> Tensor:
    """Normalize over the last dimensions, with weight and bias; arguments as in `fused_layer_norm`."""
    return functional.layer_norm(input, _shape(normalized_shape), weight, bias, eps)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6) -> Tensor:  # noqa: A002 - PyTorch's name
    """Divide by the root of the mean of squares, without weight; arguments as in `fused_layer_norm`."""
    return functional.rms_norm(input, _shape(normalized_shape), eps=eps)


def fused_rms_norm_affine(
    input: Tensor,  # noqa: A002 - PyTorch's name
    weight: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
) -> Tensor:
    """Divide by the root of the mean of squares, with weight; arguments as in `fused_layer_norm`."""
    return functional.rms_norm(input, _shape(normalized_shape), weight, eps)


class FusedLayerNormFunction:
    """What was an autograd function, for its ``apply``; autograd knows PyTorch's layer norm by itself."""

    @staticmethod
    def apply(input: Tensor, normalized_shape: Shape, eps: float = 1e-6) -> Tensor:  # noqa: A002 - PyTorch's name
        """Call `fused_layer_norm`."""
        return fused_layer_norm(input, normalized_shape, eps)


class FusedLayerNormAffineFunction:
    """What was an autograd function, for its ``apply``; autograd knows PyTorch's layer norm by itself."""

    @staticmethod
    def apply(
        input: Tensor,  # noqa: A002 - PyTorch's name
        weight: Tensor | None,
        bias: Tensor | None,
        normalized_shape: Shape,
        eps: float = 1e-6,
    ) -> Tensor:
        """Call `fused_layer_norm_affine`."""
        return fused_layer_norm_affine(input, weight, bias, normalized_shape, eps)


def _shape(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)


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
