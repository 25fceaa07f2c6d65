"""``amp.initialize``: models, optimizers, casts and scalers brought to a level."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mezzo.apex.amp import casts, registered
from mezzo.apex.amp._amp_state import _amp_state, maybe_print
from mezzo.apex.amp.checks import (
    as_list_of_models,
    as_list_of_optimizers,
    check_models,
    check_optimizers,
    inner_optimizer,
)
from mezzo.apex.amp.loss_scaler import LossScaler
from mezzo.apex.amp.models import cast_models
from mezzo.apex.amp.option_values import PARSERS
from mezzo.apex.amp.properties import Properties, describe, resolve
from mezzo.apex.amp.stash import attach_stash
from mezzo.apex.amp.steps import watch_amp_steps
from mezzo.apex.amp.without_sync import watch_sync
from mezzo.errors import AmpOptionError

__all__ = ["initialize"]

_LOW = (torch.float16, torch.bfloat16)
_BY_NAME = {"": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
_VARIABLE = "MEZZO_APEX_DTYPE"


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    keep_batchnorm_fp32: Any = None,
    master_weights: Any = None,
    loss_scale: Any = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Make models and optimizers train in mixed precision: Apex's call, its levels and its options.

    In place; what comes is what is returned. O0 is float32. O1 casts around ops, everywhere in the thread and in threads
    that call a model, by the policy ``"apex-o1"``; weights stay float32. O2 stores weights low, but for batch norms, with
    float32 masters in the optimizer. O3 stores everything low. Models may be on a CPU. docs/from-apex.md has the details.

    Args:
        models: A module, or a list of modules, before DDP or the like wraps them; their parameters are float32.
        optimizers: None, an optimizer, or a list of optimizers.
        enabled: If false, nothing is done here or in any other call.
        opt_level: ``"O0"``, ``"O1"``, ``"O2"`` or ``"O3"``, with the letter O.
        cast_model_type: The dtype of the model's weights and inputs; False casts neither. With O1 it stays None.
        patch_torch_functions: Whether ops are cast; True with O1 only.
        keep_batchnorm_fp32: Whether batch norms stay float32; also as a string. Not with O1.
        master_weights: Whether the optimizers hold float32 masters. Not with O1.
        loss_scale: ``"dynamic"``, or a number, also as a string.
        cast_model_outputs: The dtype of what the models return; by default float32 where their inputs are cast.
        num_losses: How many scalers there are; see ``loss_id`` of ``scale_loss``.
        verbosity: 0 prints nothing.
        min_loss_scale: Dynamic scales do not fall below it; None or 0 for 2**-24.
        max_loss_scale: They do not grow beyond it; None for no limit.
        dtype: ``torch.float16``, or ``torch.bfloat16``, which needs no scaling: the loss scale is 1.0 then if none is given.
            None: that of ``cast_model_type``, else of the environment variable ``MEZZO_APEX_DTYPE``, else float16. Apex had
            no such argument.

    Returns:
        The models; with optimizers, a tuple of models and optimizers, each as it came, alone or in its list.

    Raises:
        AmpOptionError: An option has a value that is not allowed.
        AmpError: Options that do not go together; a model that is wrapped or in low precision; an optimizer that came
            before.
        AmpTypeError: A tuple, or another thing that is no model or optimizer. Nothing is changed by a call that raises.

    Not to be called while another thread uses the models or optimizers. The state is the process's; the last call counts.

    Example:
        >>> import torch
        >>> from mezzo.apex import amp
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> model[0].weight.dtype, model[1].weight.dtype, model(torch.ones(2, 4)).dtype
        (torch.float16, torch.float32, torch.float32)

    Source: the page ``apex.amp`` of Apex's documentation.
    """
    listed, given = as_list_of_models(models)[0], as_list_of_optimizers(optimizers)[0]
    if not PARSERS["enabled"](enabled, None):
        _disable(verbosity)
        return _returned(models, optimizers)
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    low = _low_dtype(dtype, cast_model_type)
    defaults, properties = resolve(opt_level, overrides, low)
    check_optimizers(given)
    check_models(listed, _amp_state.allow_incoming_model_not_fp32)
    inner = [inner_optimizer(each) for each in given]
    scalers = _scalers(properties.loss_scale, num_losses, min_loss_scale, max_loss_scale)
    _start(listed, inner, properties, low or torch.float16, cast_model_outputs)
    for each in given:
        attach_stash(each)
    watch_amp_steps()
    if properties.patch_torch_functions:
        registered.close()
    else:
        registered.reopen()
    _amp_state.opt_properties, _amp_state.loss_scalers = properties, scalers
    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    _amp_state.verbosity = verbosity
    _look_for_parameters(listed, inner)
    for line in describe(defaults, properties):
        maybe_print(line, rank0=True)
    return _returned(models, optimizers)


def _look_for_parameters(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Say so if an optimizer has none of the models' parameters: mostly they were moved, copied or made anew since."""
    mine = {id(one) for model in models for one in model.parameters()}
    for optimizer in optimizers:
        theirs = {id(getattr(one, "model_param", one)) for group in optimizer.param_groups for one in group["params"]}
        if mine and theirs and not mine & theirs:
            kind = type(optimizer).__name__
            maybe_print(f"Warning: none of the {len(theirs)} parameters of this {kind} are the models'.", rank0=True)


def _returned(models: Any, optimizers: Any) -> Any:
    return models if optimizers is None else (models, optimizers)


def _disable(verbosity: int) -> None:
    casts.stop()
    registered.give_back_registrations()
    registered.reopen()
    _amp_state.opt_properties, _amp_state.handle = Properties(), None
    _amp_state.verbosity = verbosity


def _low_dtype(dtype: torch.dtype | None, cast_model_type: Any) -> torch.dtype | None:
    if isinstance(dtype, str) and dtype.removeprefix("torch.") in _BY_NAME:
        dtype = _BY_NAME[dtype.removeprefix("torch.")]
    if dtype is not None and dtype not in _LOW:
        msg = f"dtype is torch.float16 or torch.bfloat16, got {dtype!r}."
        raise AmpOptionError(msg)
    if cast_model_type in _LOW:
        if dtype not in (None, cast_model_type):
            msg = f"dtype={dtype} and cast_model_type={cast_model_type} contradict each other. Leave one of them out."
            raise AmpOptionError(msg)
        return cast_model_type  # type: ignore[no-any-return]
    if dtype is not None:
        return dtype
    name = os.environ.get(_VARIABLE, "")
    if name not in _BY_NAME:
        msg = f"The environment variable {_VARIABLE} is 'float16' or 'bfloat16', got {name!r}."
        raise AmpOptionError(msg)
    return _BY_NAME[name]


def _scalers(loss_scale: Any, count: Any, floor: float | None, ceiling: float | None) -> list[LossScaler]:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        msg = f"num_losses is the number of losses, at least 1; got {count!r}."
        raise AmpOptionError(msg)
    return [LossScaler(loss_scale, min_loss_scale=floor, max_loss_scale=ceiling) for _ in range(count)]


def _start(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    properties: Properties,
    low: torch.dtype,
    outputs: torch.dtype | None,
) -> None:
    """Cast what is to be cast: first what may fail without having changed anything."""
    casting = bool(properties.patch_torch_functions)
    rules = registered.take_registrations() if casting else {}
    try:
        cast_models(list(models), list(optimizers), properties, outputs)
        handle = casts.start(_device_types(models), low, rules) if casting else None
    except BaseException:
        if casting:
            registered.give_back_registrations()
        raise
    if not casting:
        casts.stop()
        registered.give_back_registrations()
    else:
        for model in models:
            casts.watch_model(model)
    for model in models:
        watch_sync(model)
    _amp_state.handle = handle


def _device_types(models: Sequence[nn.Module]) -> list[str]:
    """Name the types of devices that the models are on; of models without parameters, where this machine computes."""
    found = {each.device.type for model in models for each in (*model.parameters(), *model.buffers())}
    if not found:
        accelerator = torch.accelerator.current_accelerator()
        found = {"cpu" if accelerator is None else accelerator.type}
    return sorted(found)
