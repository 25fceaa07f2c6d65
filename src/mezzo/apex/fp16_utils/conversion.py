"""Models and modules cast to float16 by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "convert_module",
    "convert_network",
    "network_to_half",
    "to_python_float",
    "tofp16",
]


def to_python_float(t: Any) -> float:
    """Give the number in a tensor of one element.

    Args:
        t: The tensor; or a sequence, of which the first is given.

    Returns:
        The number.

    Example:
        >>> import torch
        >>> from mezzo.apex.fp16_utils import to_python_float
        >>> to_python_float(torch.tensor([0.5]))
        0.5
    """
    return t.item() if hasattr(t, "item") else t[0]  # type: ignore[no-any-return]


class tofp16(nn.Module):  # noqa: N801 - Apex's name
    """A module that casts its input to float16.

    Example:
        >>> import torch
        >>> from mezzo.apex.fp16_utils import tofp16
        >>> tofp16()(torch.ones(1)).dtype
        torch.float16
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - Apex's name
        """Cast.

        Args:
            input: A tensor.

        Returns:
            It in float16.
        """
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:  # noqa: N802 - Apex's name
    """Cast the batch norms in a module that have weights to float32, in place.

    Args:
        module: The module.

    Returns:
        The module.

    Example:
        >>> import torch
        >>> from mezzo.apex.fp16_utils import BN_convert_float
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).half()
        >>> [one.dtype for one in BN_convert_float(model).parameters()]
        [torch.float16, torch.float16, torch.float32, torch.float32]
    """
    for one in module.modules():
        if _is_kept(one):
            one.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """Cast a model to float16 except for batch norms, and have it cast its input.

    Args:
        network: The model; cast in place.

    Returns:
        An `nn.Sequential` of `tofp16` and the model.

    Example:
        >>> import torch
        >>> from mezzo.apex.fp16_utils import network_to_half
        >>> network_to_half(torch.nn.Linear(2, 2))(torch.ones(1, 2)).dtype
        torch.float16
    """
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating parameters, their gradients, and the buffers of a module itself, not of those inside.

    Args:
        module: The module; changed in place.
        dtype: The dtype.

    Example:
        >>> import torch
        >>> from mezzo.apex.fp16_utils import convert_module
        >>> linear = torch.nn.Linear(2, 2)
        >>> convert_module(linear, torch.float16)
        >>> linear.weight.dtype
        torch.float16
    """
    for one in module.parameters(recurse=False):
        if one.is_floating_point():
            gradient, one.grad = one.grad, None
            one.data = one.data.to(dtype)
            one.grad = None if gradient is None else gradient.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            setattr(module, name, buffer.to(dtype))


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a model except for batch norms that have weights, in place.

    Args:
        network: The model.
        dtype: The dtype.

    Returns:
        The model.

    Example:
        >>> import torch
        >>> from mezzo.apex.fp16_utils import convert_network
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        >>> [one.dtype for one in convert_network(model, torch.float16).parameters()]
        [torch.float16, torch.float16, torch.float32, torch.float32]
    """
    for one in network.modules():
        if _is_kept(one):
            continue
        convert_module(one, dtype)
        if isinstance(one, nn.RNNBase):
            one.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """A model in float16, batch norms excepted, that casts its inputs.

    Args:
        network: The model; cast in place.

    Example:
        >>> import torch
        >>> from mezzo.apex.fp16_utils import FP16Model
        >>> FP16Model(torch.nn.Linear(2, 2))(torch.ones(1, 2)).dtype
        torch.float16
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: Tensor) -> Any:
        """Cast the inputs and call the model.

        Args:
            *inputs: Tensors.

        Returns:
            What the model returns.
        """
        return self.network(*(one.half() for one in inputs))


def _is_kept(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.affine
