"""What `mezzo.torch.prepare` refuses, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.errors import PreparationError

from .copies import owner_of
from .params import master_of, masters_in
from .preparation import Preparation, preparation_of
from .settings import Settings

__all__ = ["check_arithmetic", "check_model", "check_optimizers", "check_settings", "check_undo", "checked"]

LOW = (torch.bfloat16, torch.float16)


def check_settings(settings: Settings) -> Settings:
    """Check options, alone and together; give them with what they imply filled in."""
    dtype, grad_dtype = settings.dtype, settings.grad_dtype
    if dtype not in LOW:
        msg = f"prepare stores parameters in torch.bfloat16 or torch.float16, got dtype={dtype!r}."
        raise PreparationError(msg)
    if not isinstance(settings.masters, bool) and settings.masters != "kahan":
        msg = f"masters is True, False or 'kahan', got {settings.masters!r}."
        raise PreparationError(msg)
    if settings.rounding not in ("nearest", "stochastic"):
        msg = f"rounding is 'nearest' or 'stochastic', got {settings.rounding!r}."
        raise PreparationError(msg)
    if isinstance(settings.seed, bool) or not isinstance(settings.seed, int):
        msg = f"seed is an int, got {settings.seed!r}."
        raise PreparationError(msg)
    if grad_dtype not in (None, torch.float32, dtype):
        msg = f"grad_dtype is None, torch.float32 or the dtype of the parameters, {dtype}; got {grad_dtype!r}."
        raise PreparationError(msg)
    if not settings.steps_in_float32 and grad_dtype is torch.float32:
        msg = (
            "grad_dtype=torch.float32 does not go with masters=False and rounding='nearest', where the optimizer computes "
            f"in {dtype}. Leave it out, or use masters=True, masters='kahan' or rounding='stochastic'."
        )
        raise PreparationError(msg)
    if dtype is torch.float16 and settings.steps_in_float32:
        if grad_dtype is torch.float16:
            msg = (
                "grad_dtype=torch.float16: unscaled gradients underflow in float16, which is why they are scaled. Leave "
                "grad_dtype out to have them in float32, or use dtype=torch.bfloat16."
            )
            raise PreparationError(msg)
        grad_dtype = torch.float32
    if settings.compiled and (settings.masters is not True or settings.rounds_at_random):
        msg = (
            "compiled=True steps with float32 masters that are rounded to nearest; it does not go with "
            f"masters={settings.masters!r}, rounding={settings.rounding!r}. Leave one of them out."
        )
        raise PreparationError(msg)
    return Settings(dtype, settings.masters, settings.rounding, settings.seed, grad_dtype, bool(settings.compiled))


def check_model(inner: nn.Module, optimizers: list[Any], settings: Settings, *, chosen: bool) -> None:
    """Check the model.

    Args:
        inner: The model, without the wrapper of `torch.compile`.
        optimizers: What came with it.
        settings: How to store its parameters.
        chosen: Whether the call says which parameters.
    """
    record = preparation_of(inner)
    if record is not None:
        _check_again(inner, record, optimizers, settings, chosen=chosen)
        return
    part = next((name for name, one in inner.named_modules() if preparation_of(one) is not None), None)
    if part is not None:
        msg = (
            f"A part of the model, {part!r}, is prepared already. Undo that with mezzo.torch.unprepare, then prepare the "
            "whole model."
        )
        raise PreparationError(msg)
    low = [name for name, one in inner.named_parameters() if one.dtype in LOW]
    if low:
        count = f"{len(low)} of its parameters, such as {low[0]!r}," if len(low) > 1 else f"its parameter {low[0]!r}"
        then = "make the optimizer and prepare" if optimizers else "prepare. For inference it is as it should be"
        msg = (
            f"The model is in low precision already: {count} would have a master of rounded values. Load the float32 "
            f"weights first: model.float(), then load_state_dict, then {then}."
        )
        raise PreparationError(msg)
    sharded = next((name for name, one in inner.named_parameters() if hasattr(one, "device_mesh")), None)
    if sharded is not None:
        msg = (
            f"The model is sharded already ({sharded!r} is a DTensor). Call prepare(model) first, then fully_shard, with "
            "modules whose parameters stay float32, such as norms, sharded by themselves; then make the optimizer, and "
            "prepare(model, optimizer) gives it masters."
        )
        raise PreparationError(msg)


def _check_again(
    model: nn.Module, record: Preparation, optimizers: list[Any], settings: Settings, *, chosen: bool
) -> None:
    """Check the second call on a model that was prepared without an optimizer, or on a copy of a model."""
    if not optimizers:
        msg = "The model is prepared already. mezzo.torch.unprepare(model) undoes that."
        raise PreparationError(msg)
    if chosen or settings.dtype is not record.settings.dtype:
        msg = (
            f"The model is prepared already, in {record.settings.dtype}, so which parameters to store low is settled: call "
            "prepare(model, optimizer) with that dtype and without policy, low, keep and buffers, or unprepare it first."
        )
        raise PreparationError(msg)
    if record.with_optimizer and not record.settings.steps_in_float32:
        msg = (
            "The model is prepared already, without masters: any optimizer over its parameters steps on them as they are. "
            "Undo it with mezzo.torch.unprepare(model, optimizer) to prepare it in another way."
        )
        raise PreparationError(msg)
    if any(master_of(one) is not None for one in model.parameters()):
        msg = (
            "The model is prepared already, and an optimizer has its masters. Give all its optimizers in one call, "
            "prepare(model, [first, second]), or undo the first with mezzo.torch.unprepare(model, optimizer)."
        )
        raise PreparationError(msg)


def _unwrapped(model: nn.Module, caller: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        msg = f"{caller} takes a torch.nn.Module, got {type(model).__name__}."
        raise TypeError(msg)
    compiled = getattr(model, "_orig_mod", None)
    if isinstance(compiled, nn.Module):
        model = compiled
    # FSDP's class is told by its name: its module is slow to import.
    wrapper = type(model).__name__
    wraps = isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel)
    if wraps or wrapper == "FullyShardedDataParallel":
        msg = (
            f"{caller} takes the model inside of {wrapper}, before it is wrapped: model, optimizer = prepare(model, "
            f"optimizer); then {wrapper}(model)."
        )
        raise PreparationError(msg)
    return model


def checked(model: nn.Module, optimizer: Any, caller: str) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Give a model without the wrapper of `torch.compile`, and the optimizers that came with it as a list."""
    optimizers = optimizer if isinstance(optimizer, list) else [] if optimizer is None else [optimizer]
    if caller == "memory_report" and isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    inner = _unwrapped(model, caller)
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            msg = f"{caller} takes a torch.optim.Optimizer, or a list of them, got {type(each).__name__}."
            raise PreparationError(msg)
    if len({id(each) for each in optimizers}) < len(optimizers):
        msg = "An optimizer is in the list twice."
        raise PreparationError(msg)
    return inner, optimizers


def check_optimizers(model: nn.Module, optimizers: list[Any]) -> None:
    """Check that these are optimizers of this model, without masters."""
    mine = {id(one) for one in model.parameters()}
    for optimizer in optimizers:
        if not {"_optimizer_step_pre_hooks", "_optimizer_state_dict_post_hooks"} <= vars(optimizer).keys():
            msg = (
                f"{type(optimizer).__name__} does not call torch.optim.Optimizer.__init__, so it has no hooks. If it wraps "
                "an optimizer, prepare that one before it is wrapped."
            )
            raise PreparationError(msg)
        if masters_in(optimizer) or owner_of(optimizer) is not None:
            msg = (
                f"This {type(optimizer).__name__} is prepared already. If it has the parameters of several models, prepare "
                "them together, and keep the list to undo it: prepare(nn.ModuleList([first, second]), optimizer)."
            )
            raise PreparationError(msg)
        theirs = [one for group in optimizer.param_groups for one in group["params"]]
        if not any(id(one) in mine for one in theirs):
            msg = (
                f"None of the {len(theirs)} parameters of this {type(optimizer).__name__} are the model's. Was the model "
                "moved, copied or made anew after the optimizer? Make the optimizer from model.parameters() of this model."
            )
            raise PreparationError(msg)


def check_arithmetic(low: Sequence[Tensor], optimizers: list[Any], settings: Settings) -> None:
    """Refuse optimizers whose arithmetic on low-precision parameters goes wrong."""
    if settings.steps_in_float32:
        return
    stored = {id(one) for one in low}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            mine = [one for one in group["params"] if id(one) in stored]
            eps = group.get("eps")
            if isinstance(optimizer, torch.optim.SGD) and group.get("fused") and any(one.is_cpu for one in mine):
                msg = (
                    f"SGD(fused=True) leaves parameters in {settings.dtype} as they are on a CPU (PyTorch issue 191763). "
                    "Use fused=False, or masters=True, whose steps are in float32."
                )
                raise PreparationError(msg)
            if not isinstance(eps, float) or group.get("fused") or not mine:
                continue
            if torch.tensor(eps, dtype=settings.dtype).item() == 0:
                msg = (
                    f"{type(optimizer).__name__}'s eps={eps:g} is 0 in {settings.dtype}, in which it computes without "
                    "masters: a gradient of 0 would give NaN. Use masters=True, or rounding='stochastic' (float32 "
                    "arithmetic), or fused=True, or an eps of at least 1e-7 (1e-4 is common)."
                )
                raise PreparationError(msg)


def check_undo(inner: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Preparation:
    """Check what `mezzo.torch.unprepare` was given; give the model's record."""
    record = preparation_of(inner)
    if record is None:
        msg = (
            "The model is not prepared, so there is nothing to undo. If it was prepared as a part of another, such as an "
            "nn.ModuleList, give that one."
        )
        raise PreparationError(msg)
    if any(hasattr(one, "device_mesh") for one in inner.parameters()):
        msg = (
            "The model is sharded: FSDP holds its parameters in low precision by itself, and this cannot be undone in "
            "place. mezzo.torch.float32_state_dict(model) gives the float32 values, to be loaded into another model."
        )
        raise PreparationError(msg)
    theirs = {id(one) for optimizer in optimizers for one in masters_in(optimizer)}
    mine = [master for one in inner.parameters() if (master := master_of(one)) is not None]
    missing = [one for one in mine if id(one) not in theirs]
    if missing:
        msg = (
            f"{len(missing)} masters of the model belong to an optimizer that was not given: call unprepare(model, "
            "optimizer), with a list if there are several."
        )
        raise PreparationError(msg)
    ids = {id(one) for one in mine}
    # One whose masters belong to a module that has left the model is this model's all the same.
    if any((held := set(map(id, masters_in(each)))) and not held & ids for each in optimizers):
        msg = "The optimizer has masters of another model. Give the optimizer that this model was prepared with."
        raise PreparationError(msg)
    return record
