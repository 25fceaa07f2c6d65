"""What `mezzo.apex.amp.initialize` takes: models, optimizers and lists of them, and in which state."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mezzo.errors import AmpError, AmpTypeError

__all__ = [
    "as_list_of_models",
    "as_list_of_optimizers",
    "check_models",
    "check_optimizers",
    "inner_model",
    "inner_optimizer",
]

_LOW = (torch.float16, torch.bfloat16)
_FSDP = "FullyShardedDataParallel"
_OF_APEX = (
    "_amp_stash",
    "_lazy_init_maybe_master_weights",
    "_master_params_to_model_params",
    "_prepare_amp_backward",
    "_post_amp_backward",
    "_amp_lazy_init",
)


def as_list_of_models(models: Any) -> tuple[list[nn.Module], bool]:
    """Give models as a list.

    Args:
        models: A module, or a list of modules.

    Returns:
        The list, the very one that came if it was one, and whether it was.

    Raises:
        AmpTypeError: It is something else.

    Example:
        >>> as_list_of_models(nn.ReLU())
        ([ReLU()], False)
    """
    if isinstance(models, nn.Module):
        return [models], False
    _check_list("models", models, "a model (torch.nn.Module)", "models")
    wrong = [one for one in models if not isinstance(one, nn.Module)]
    if wrong:
        msg = f"models is a model (torch.nn.Module) or a list of models; in the list there is a {_kind(wrong[0])}."
        raise AmpTypeError(msg)
    return models, True


def as_list_of_optimizers(optimizers: Any) -> tuple[list[Any], bool]:
    """Give optimizers as a list.

    Args:
        optimizers: An optimizer, a list of them, or None. What wraps an optimizer, as LARC does, counts as one: it has
            ``param_groups`` and ``step``.

    Returns:
        The list, the very one that came if it was one, and whether it was. None gives an empty list.

    Raises:
        AmpTypeError: It is something else.
        AmpError: It is one of the legacy ``FP16_Optimizer`` classes.

    Example:
        >>> as_list_of_optimizers(None)
        ([], False)
    """
    if optimizers is None:
        return [], False
    was_list = not _is_optimizer(optimizers)
    if was_list:
        _check_list("optimizers", optimizers, "an optimizer (torch.optim.Optimizer)", "optimizers")
    found = optimizers if was_list else [optimizers]
    wrong = [one for one in found if not _is_optimizer(one)]
    if wrong:
        msg = (
            "optimizers is an optimizer (torch.optim.Optimizer) or a list of optimizers; in the list there is a "
            f"{_kind(wrong[0])}."
        )
        raise AmpTypeError(msg)
    if any(type(one).__name__ == "FP16_Optimizer" for one in found):
        msg = (
            "An FP16_Optimizer holds masters and scales losses by itself. Give amp.initialize the optimizer that is inside, "
            "and use amp.scale_loss."
        )
        raise AmpError(msg)
    return found, was_list


def inner_model(model: nn.Module) -> nn.Module:
    """Give the model that `torch.compile` has wrapped, or the model itself."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def inner_optimizer(optimizer: Any) -> Any:
    """Give the optimizer that a wrapper such as LARC holds as ``optim``, or the optimizer itself."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def check_models(models: Sequence[nn.Module], allow_low: bool) -> None:
    """Check models before anything is changed. Any device will do.

    Args:
        models: The models.
        allow_low: Whether parameters and buffers may be in lower precision already.

    Raises:
        AmpError: A model is wrapped in DDP, DataParallel or FSDP already, or is in lower precision.

    Example:
        >>> check_models([nn.Linear(2, 2)], False)
    """
    for model in map(inner_model, models):
        wraps = isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel)
        if wraps or type(model).__name__ == _FSDP:
            kind = type(model).__name__
            msg = (
                f"The model is wrapped in {kind} already. Call amp.initialize with the model that is inside, then wrap what "
                f"it returns: model, optimizer = amp.initialize(model, optimizer, ...); model = {kind}(model)."
            )
            raise AmpError(msg)
        if not allow_low:
            _check_dtypes(model)


def _check_dtypes(model: nn.Module) -> None:
    named = [("parameter", name, one) for name, one in model.named_parameters()]
    named += [("buffer", name, one) for name, one in model.named_buffers()]  # type: ignore[misc]  # tensors, both
    low = next((each for each in named if each[2].dtype in _LOW), None)
    if low is not None:
        kind, name, tensor = low
        msg = (
            f"The {kind} {name!r} of {type(model).__name__} is {tensor.dtype}. amp.initialize takes models in float32 and "
            "casts them itself, so do not call .half() or .bfloat16() before, nor initialize a model twice. Load the "
            "float32 weights; or set amp._amp_state.allow_incoming_model_not_fp32 = True to have it taken as it is."
        )
        raise AmpError(msg)


def check_optimizers(optimizers: Sequence[Any]) -> None:
    """Check optimizers before anything is changed.

    Args:
        optimizers: The optimizers, and what wraps some.

    Raises:
        AmpError: One is there twice, was initialized before, or has no hooks, by which its steps could be skipped.

    Example:
        >>> check_optimizers([torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)])
    """
    inner = [inner_optimizer(one) for one in optimizers]
    if len({id(one) for one in inner}) < len(inner):
        twice = next(one for one, other in itertools.combinations(inner, 2) if one is other)
        msg = f"{type(twice).__name__} is in the list of optimizers twice. Give each optimizer once."
        raise AmpError(msg)
    for given, one in zip(optimizers, inner, strict=True):
        there = next((name for name in _OF_APEX if hasattr(given, name) or hasattr(one, name)), None)
        if there is not None:
            msg = (
                f"This {type(one).__name__} was initialized before (it has an attribute {there!r}). An optimizer goes "
                "through amp.initialize once: give all models and optimizers in one call, or make a new optimizer."
            )
            raise AmpError(msg)
        if not hasattr(one, "_optimizer_step_pre_hooks"):
            msg = (
                f"{type(one).__name__} does not call torch.optim.Optimizer.__init__, so it has no hooks, and a step of it "
                "cannot be skipped. Derive it from torch.optim.Optimizer and call super().__init__(params, defaults)."
            )
            raise AmpError(msg)


def _is_optimizer(value: Any) -> bool:
    if isinstance(value, torch.optim.Optimizer):
        return True
    return not isinstance(value, type) and hasattr(value, "param_groups") and callable(getattr(value, "step", None))


def _check_list(name: str, value: Any, one: str, many: str) -> None:
    if not isinstance(value, list):
        hint = f" Write list({name})." if isinstance(value, tuple) else ""
        msg = f"{name} is {one} or a list of {many}, got a {_kind(value)}.{hint}"
        raise AmpTypeError(msg)


def _kind(value: object) -> str:
    return f"class {value.__name__}" if isinstance(value, type) else type(value).__name__
