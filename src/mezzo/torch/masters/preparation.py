"""What a prepared model knows of itself: which parameters are stored low and why, and how."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .checkpoints import refuse_assign, take_wide_values
from .ddp import look_for_ddp, watch_ddp
from .forward import see_masters
from .params import master_of
from .settings import Settings

__all__ = ["Preparation", "mark", "preparation_of", "unmark", "warn_of_rounded", "watch_forward"]


@dataclass
class Preparation:
    """A record on a prepared model; copied, pickled and compiled along with it.

    It is kept among the model's hooks for ``load_state_dict``.

    Attributes:
        settings: How parameters are stored.
        stored: Name to reason, of the parameters that are stored low.
        kept: The same of the others.
        dtypes: Name to the dtype before, of stored parameters and buffers that were not float32.
        buffers: The names of the buffers that are stored low.
        with_optimizer: Whether an optimizer was given.
        mastered: The names of the parameters that were given masters.
    """

    settings: Settings
    stored: Mapping[str, str]
    kept: Mapping[str, str]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    with_optimizer: bool = False
    mastered: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model alone has no optimizer.
        return {**self.__dict__, "with_optimizer": False}

    def __call__(
        self, module: nn.Module, _state_dict: object, _prefix: str, local_metadata: Mapping[str, Any], *_: object
    ) -> None:
        """Refuse ``assign=True`` before anything of the model is loaded."""
        refuse_assign(module, local_metadata, held=self.with_optimizer)


def preparation_of(model: nn.Module) -> Preparation | None:
    """Give the record of a model that was prepared, or of a copy; None if it was not."""
    for hook in model._load_state_dict_pre_hooks.values():
        found = getattr(hook, "hook", None)
        if isinstance(found, Preparation):
            return found
    return None


def warn_of_rounded(model: nn.Module, what: str) -> None:
    """Warn if parameters of a model, or of its parts, had masters that are gone.

    Args:
        model: Any model.
        what: What is done with it, for the message.
    """
    gone = 0
    for module in model.modules():
        record = preparation_of(module)
        if record is not None and record.mastered:
            named = dict(module.named_parameters())
            low = [
                named[name] for name in record.mastered if name in named and named[name].dtype is record.settings.dtype
            ]
            gone += sum(master_of(one) is None for one in low)
    if gone:
        msg = (
            f"{what}: {gone} parameters come rounded, since their float32 masters are gone. Masters live in the optimizer "
            "and go with it; a copy of the model alone has none. Do this while the optimizer is there, or copy the two "
            "together."
        )
        warnings.warn(msg, stacklevel=3)


def mark(model: nn.Module, record: Preparation, modules: list[nn.Module]) -> None:
    """Put the record on a model, and the hooks that a prepared model needs.

    Args:
        model: The model.
        record: Its record.
        modules: Those that have parameters which are stored low.
    """
    model.register_load_state_dict_pre_hook(record)
    for module in modules:
        module.register_load_state_dict_pre_hook(take_wide_values)


def watch_forward(model: nn.Module) -> None:
    """Put the hooks on a model that is trained; on others they would keep PyTorch from its fused layers."""
    for hook in (look_for_ddp, see_masters):
        if hook not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(hook)
    watch_ddp()


def unmark(model: nn.Module) -> None:
    """Take away what `mark` put there."""
    _remove(model._forward_pre_hooks, lambda hook: hook is look_for_ddp or hook is see_masters)
    for module in model.modules():
        _remove(module._load_state_dict_pre_hooks, _is_ours)


def _is_ours(hook: Any) -> bool:
    inner = getattr(hook, "hook", None)
    return inner is take_wide_values or isinstance(inner, Preparation)


def _remove(hooks: Any, which: Any) -> None:
    for key in [key for key, hook in hooks.items() if which(hook)]:
        del hooks[key]
