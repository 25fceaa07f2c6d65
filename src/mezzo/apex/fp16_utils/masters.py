"""Float32 masters of a model's parameters, kept by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from mezzo.errors import AmpError

__all__ = ["master_params_to_model_params", "model_grads_to_master_grads", "prep_param_lists"]


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Make float32 masters of the parameters of a model that are trained.

    Args:
        model: The model.
        flat_master: Whether to make one master of all parameters, which then have one dtype.

    Returns:
        The parameters, and their masters; with ``flat_master`` the one, as a list, with a gradient of zeros.

    Raises:
        AmpError: One master was asked for, and there are several dtypes.

    Example:
        >>> import torch
        >>> from mezzo.apex.fp16_utils import prep_param_lists
        >>> model_params, master_params = prep_param_lists(torch.nn.Linear(2, 2).half(), flat_master=True)
        >>> [(one.dtype, tuple(one.shape)) for one in master_params]
        [(torch.float32, (6,))]
    """
    params = [one for one in model.parameters() if one.requires_grad]
    if not flat_master:
        return params, [nn.Parameter(one.detach().float().clone()) for one in params]
    dtypes = sorted({str(one.dtype) for one in params})
    if len(dtypes) != 1:
        msg = (
            f"One flat master is of parameters of one dtype, and these are {', '.join(dtypes) or 'none'}. "
            "Use flat_master=False."
        )
        raise AmpError(msg)
    master = nn.Parameter(_flatten_dense_tensors([one.detach() for one in params]).float())
    master.grad = torch.zeros_like(master)
    return params, [master]


def model_grads_to_master_grads(
    model_params: Sequence[nn.Parameter], master_params: Sequence[nn.Parameter], flat_master: bool = False
) -> None:
    """Copy the gradients of a model's parameters to their masters, in float32.

    Args:
        model_params: The parameters.
        master_params: Their masters, from `prep_param_lists`.
        flat_master: Whether there is one master of all; then each parameter has a gradient.

    Raises:
        AmpError: There is one master, and a parameter has no gradient.

    Example:
        >>> import torch
        >>> from mezzo.apex.fp16_utils import model_grads_to_master_grads, prep_param_lists
        >>> model_params, master_params = prep_param_lists(torch.nn.Linear(2, 1).half())
        >>> model_params[0].grad = torch.ones(1, 2, dtype=torch.float16)
        >>> model_grads_to_master_grads(model_params, master_params)
        >>> master_params[0].grad, master_params[1].grad
        (tensor([[1., 1.]]), None)
    """
    if flat_master:
        gradients = [one.grad for one in model_params if one.grad is not None]
        if len(gradients) < len(model_params):
            msg = (
                f"One flat master takes the gradients of all {len(model_params)} parameters, and {len(gradients)} have one. "
                "Run the backward pass before, or use flat_master=False."
            )
            raise AmpError(msg)
        flat = _flatten_dense_tensors(gradients)
        master_params[0].grad = flat.to(master_params[0].dtype, copy=True)
        return
    for model, master in zip(model_params, master_params, strict=True):
        master.grad = None if model.grad is None else model.grad.detach().to(master.dtype, copy=True)


def master_params_to_model_params(
    model_params: Sequence[nn.Parameter], master_params: Sequence[nn.Parameter], flat_master: bool = False
) -> None:
    """Round the masters to the parameters of a model.

    Args:
        model_params: The parameters.
        master_params: Their masters, from `prep_param_lists`.
        flat_master: Whether there is one master of all.

    Example:
        >>> import torch
        >>> from mezzo.apex.fp16_utils import master_params_to_model_params, prep_param_lists
        >>> model_params, master_params = prep_param_lists(torch.nn.Linear(1, 1).half())
        >>> master_params[0].data.fill_(2.0)
        tensor([[2.]])
        >>> master_params_to_model_params(model_params, master_params)
        >>> model_params[0].data
        tensor([[2.]], dtype=torch.float16)
    """
    with torch.no_grad():
        for model, values in _pairs(model_params, master_params, flat=flat_master):
            model.copy_(values)


def _pairs(
    model_params: Sequence[nn.Parameter], master_params: Sequence[nn.Parameter], *, flat: bool
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    masters = _unflatten_dense_tensors(master_params[0].detach(), model_params) if flat else master_params
    return zip(model_params, masters, strict=True)
