"""State dicts in float32, of models whose weights are stored in a lower precision.

Apex gave the low weights, made float32, in copies. Here an entry is the float32 master where there is one: what is saved has
lost nothing, and what holds the entries, such as an average of weights, sees the steps to come and may write to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.torch.masters.params import master_of, take_over_writes

__all__ = ["give_float32", "put_float32_states"]

_LOW = (torch.float16, torch.bfloat16)


def put_float32_states(model: nn.Module) -> None:
    """Have a model, and each module in it, give float32 state dicts. Done twice, it is done once.

    Args:
        model: The model. Copies and pickles of it do so too, with what they have.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2)).bfloat16()
        >>> put_float32_states(model)
        >>> model[0].state_dict()["weight"].dtype, model[0].weight.dtype
        (torch.float32, torch.bfloat16)
    """
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # it takes no hooks, and is never stored low
        if give_float32 not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(give_float32)


@torch.no_grad()
def give_float32(module: nn.Module, state_dict: dict[str, Any], prefix: str, _local_metadata: object) -> None:
    """Put float32 tensors in the places of a module's own low ones: a hook of its ``state_dict``.

    Args:
        module: The module.
        state_dict: What its ``state_dict`` gives. With ``keep_vars=True`` it has the parameters themselves, which stay.
        prefix: Of the module's names in it.
        _local_metadata: PyTorch's.
    """
    for name, own in _own(module):
        given = state_dict.get(prefix + name)
        if given is not own and isinstance(given, Tensor) and given.dtype in _LOW:
            state_dict[prefix + name] = _float32(own, given)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for named in (module._parameters, module._buffers):
        yield from ((name, one) for name, one in named.items() if one is not None)


def _float32(own: Tensor, given: Tensor) -> Tensor:
    master = master_of(own)
    if master is None or not master.owner.settings.keeps_masters:
        return given.float()
    take_over_writes(master, look=True)
    # It shares the count of writes with the master, so the model's next forward pass sees what is written to it.
    itself: Any = master
    return itself.detach()  # type: ignore[no-any-return]
