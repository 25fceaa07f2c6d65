"""How `mezzo.apex.amp.initialize` casts models, with the state of their optimizers: the levels O0, O2 and O3.

Parameters stay the same objects. To a lower precision `mezzo.torch.prepare` brings them, which gives the optimizers float32
masters too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mezzo.apex.amp._amp_state import maybe_print
from mezzo.apex.amp.checks import inner_model, inner_optimizer
from mezzo.apex.amp.float32_states import put_float32_states
from mezzo.apex.amp.inputs import put_casts
from mezzo.apex.amp.model_groups import Group, groups_of
from mezzo.apex.amp.model_values import FLOATS, Before, cast_in_place, parameters_of
from mezzo.apex.amp.properties import Properties
from mezzo.errors import AmpError, AmpOptionError
from mezzo.torch.masters.preparation import preparation_of

__all__ = ["cast_models"]

_LOW = (torch.float16, torch.bfloat16)


def cast_models(
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    properties: Properties,
    outputs_dtype: torch.dtype | None,
) -> None:
    """Cast models in place, with their inputs, outputs and state dicts, and give their optimizers masters.

    Args:
        models: The models, not wrapped in DDP or alike. Parameters keep their identity and their gradients.
        optimizers: All that hold the models' parameters, and what wraps some as LARC does. The state goes along. Others are
            left as they are.
        properties: ``cast_model_type`` is the dtype of weights and inputs; None and False leave both. With
            ``keep_batchnorm_fp32`` batch norms stay float32, running statistics too. With ``master_weights`` the optimizers
            hold float32 masters of low weights.
        outputs_dtype: Of the outputs. None: float32 if the model is cast, else they are left.

    Raises:
        AmpError: A model was cast before, is a ScriptModule, or has parameters without a shape; or masters are asked of
            what is no ``torch.optim.Optimizer``. Nothing is changed then.
        AmpOptionError: ``outputs_dtype`` is no floating-point dtype.
        PreparationError: `mezzo.torch.prepare` refuses the model, as one that is sharded. Nothing is changed then.

    Not to be called while another thread uses the models or optimizers.

    Example:
        >>> from mezzo.apex.amp.properties import resolve
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> cast_models([model], [optimizer], resolve("O2", {}, torch.float16)[1], None)
        >>> model[0].weight.dtype, model[1].weight.dtype, optimizer.param_groups[0]["params"][0].dtype
        (torch.float16, torch.float32, torch.float32)
        >>> model(torch.ones(2, 2)).dtype
        torch.float32
    """
    models = list({id(one): one for one in map(inner_model, models)}.values())
    dtype = properties.cast_model_type or None
    if outputs_dtype is not None and outputs_dtype not in FLOATS:
        msg = (
            "cast_model_outputs is a dtype of floating-point numbers, such as torch.float32 or torch.float16, or None; got "
            f"{outputs_dtype!r}."
        )
        raise AmpOptionError(msg)
    _check(models, dtype, hooked=dtype is not None or outputs_dtype is not None)
    said: list[str] = []
    if dtype is not None:
        theirs = _with_parameters_of(models, optimizers, masters=dtype in _LOW and bool(properties.master_weights))
        # Tensors made in inference mode cannot be trained.
        with torch.inference_mode(False):
            said = _cast(models, theirs, dtype, properties)
        for model in models:
            put_float32_states(model)
            _flatten_rnns(model)
    for model in models:
        put_casts(model, dtype, torch.float32 if outputs_dtype is None and dtype is not None else outputs_dtype)
    for line in said:
        maybe_print(line, rank0=True)


def _check(models: Sequence[nn.Module], dtype: torch.dtype | None, *, hooked: bool) -> None:
    for model in models:
        inside = any(isinstance(one, torch.jit.ScriptModule) for one in model.modules()) and dtype in _LOW
        if inside or (hooked and isinstance(model, torch.jit.ScriptModule)):
            msg = (
                f"{type(model).__name__} is a ScriptModule or has one inside, on which PyTorch supports no hooks, so it "
                "cannot be cast. Give the model before torch.jit.script, or use opt_level='O1'."
            )
            raise AmpError(msg)
        if dtype is None:
            continue
        if any(preparation_of(one) is not None for one in model.modules()):
            msg = (
                f"{type(model).__name__} was cast before, by amp.initialize or mezzo.torch.prepare. Give all its optimizers "
                "in one call of amp.initialize, or undo the first with mezzo.torch.unprepare(model, optimizer)."
            )
            raise AmpError(msg)
        lazy = next((name for name, one in model.named_parameters() if is_lazy(one)), None)
        if lazy is not None:
            msg = (
                f"The parameter {lazy!r} of {type(model).__name__} has no shape before the model has run. Run one forward "
                "with a batch first, then make the optimizer and call amp.initialize."
            )
            raise AmpError(msg)


def _with_parameters_of(
    models: Sequence[nn.Module], optimizers: Sequence[Any], *, masters: bool
) -> list[torch.optim.Optimizer]:
    """Give the optimizers that hold parameters of models, without what wraps them."""
    mine = set(map(id, parameters_of(models)))
    found = []
    for one in map(inner_optimizer, optimizers):
        if not any(id(each) in mine for group in one.param_groups for each in group["params"]):
            continue
        if isinstance(one, torch.optim.Optimizer):
            found.append(one)
        elif masters:
            msg = (
                f"{type(one).__name__} is no torch.optim.Optimizer and holds none as `optim`, so it cannot be given float32 "
                "masters. Give the optimizer that is inside, or use opt_level='O1'."
            )
            raise AmpError(msg)
    return found


def _cast(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    dtype: torch.dtype,
    properties: Properties,
) -> list[str]:
    """Cast the values of models; all of them or none. Give what there is to say."""
    before, said = Before(models, optimizers), []
    done: list[Group] = []
    try:
        cast_in_place(models, optimizers, torch.float32 if dtype in _LOW else dtype)
        for group in groups_of(models, optimizers) if dtype in _LOW else ():
            said += group.to_low(dtype, properties)
            done.append(group)
    except BaseException:
        for group in done:
            group.undo()
        before.put_back()
        raise
    for group in done:
        group.mark_each()
    return said


def _flatten_rnns(model: nn.Module) -> None:
    """Have the weights of RNNs in one piece of memory again, which cuDNN asks for; on a CPU this does nothing."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
