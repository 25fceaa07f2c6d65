"""Float32 masters: what an optimizer holds in place of parameters that are stored in a lower precision.

A `Master` has the values; the gradient is that of the model's parameter, read and written through. So there is one gradient,
whoever looks: ``unscale_``, ``clip_grad_norm_`` over masters or over the model, hooks, ``zero_grad`` of either, and DDP's
all-reduce all mean the same tensor, and there is no moment at which two copies differ.

PyTorch lets a gradient have another dtype than its tensor (``Tensor.grad_dtype``), so gradients that are sums are float32
although the weights are not: autograd adds to them in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from mezzo.torch.agreement import local

from .gradients import let_go, link_gradients, links, set_gradient
from .rounding import may_come_from
from .settings import Owner

__all__ = [
    "Made",
    "Master",
    "MasterParameter",
    "make_master",
    "master_of",
    "master_params",
    "masters_in",
    "no_values",
    "state_of",
    "take_over_writes",
]


class Master:
    """A parameter in float32 that an optimizer updates in place of the model's, which is in a lower precision.

    Made by `mezzo.torch.prepare`; found in the optimizer's ``param_groups``, where it is a ``torch.nn.Parameter``, or a
    DTensor if the model's is one. ``grad`` and ``requires_grad`` are those of ``model_param``. It is copied and pickled
    together with the parameter that it belongs to. Not to be stepped by two threads at the same time.

    Attributes:
        model_param: The parameter of the model, of the same shape.
        owner: What it shares with the others.
        compensation: What ``model_param`` lacks, in its dtype, where the two stand for the master between steps.
        seen: The state of ``model_param`` when it was last written from here.
        written: The master's own count of writes then; -1 while a step is going on, and after one that has failed.
        loaded: A copy of ``model_param`` as a checkpoint of the optimizer had it, until the next step.
        adds: Whether gradients are added to others out of sight of autograd, as DDP does, and so always float32.
        unlink: Takes the hook away that looks at gradients, if there is one.

    Example:
        >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> from mezzo.torch.masters.settings import Settings
        >>> master = make_master(torch.ones(2), weight, Owner(Settings(torch.bfloat16)))
        >>> (weight * 3).sum().backward()
        >>> master.grad is weight.grad
        True
    """

    model_param: Tensor
    owner: Owner
    compensation: Tensor | None
    seen: tuple[int, int] | None
    written: int
    loaded: Tensor | None
    adds: bool
    unlink: Callable[[], object] | None

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the model's parameter; in an optimizer's step it is float32."""
        shown = self.owner.shown(self)
        return self.model_param.grad if shown is None else shown[0]

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        set_gradient(self.model_param, gradient)
        self.owner.assign(self, gradient)
        if gradient is None:
            let_go(self)

    @property
    def requires_grad(self) -> bool:
        """Whether the model's parameter does."""
        return self.model_param.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.model_param.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> Master:
        """Freeze or unfreeze the model's parameter."""
        self.model_param.requires_grad_(requires_grad)
        return self

    def __getattr__(self, name: str) -> Any:
        # What a user has written on the model's parameter, such as a mark for the optimizer.
        if name.startswith("__") or "model_param" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.model_param, name)

    def values(self) -> Tensor:
        """Give the tensor of the values, without the parameter."""
        values: Tensor = self.data
        return values

    def put(self, values: Tensor) -> None:
        """Give it other values, in their own memory."""
        itself: Any = self
        if hasattr(self, "_local_tensor"):
            itself._local_tensor = local(values)
        else:
            itself.data = values

    def snapshot(self) -> Callable[[], None]:
        """Keep the values, and those of the model's parameter, and give what puts them back."""
        take_over_writes(self)
        owner, rounds, loaded = self.owner, self.owner.rounds, self.loaded
        values = self.values().clone() if owner.settings.keeps_masters else None
        low = self.model_param.detach().clone()
        lacking = None if self.compensation is None else self.compensation.clone()

        @torch.no_grad()
        def put_back() -> None:
            owner.close_step()
            owner.rounds = rounds
            self.model_param.detach().copy_(low)
            if self.compensation is not None and lacking is not None:
                self.compensation.copy_(lacking)
            if values is None:
                self.put(no_values(self.model_param))
            else:
                self.values().copy_(values)
            self.seen, self.loaded = state_of(self.model_param), loaded

        return put_back

    def __deepcopy__(self, memo: dict[int, Any]) -> Master:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        take_over_writes(self, look=True)
        data = self.values()
        # One that has no values between steps is one number, expanded.
        data = data.clone() if self.owner.settings.keeps_masters else data[...]
        made = make_master(
            data,
            copy.deepcopy(self.model_param, memo),
            copy.deepcopy(self.owner, memo),
            copy.deepcopy(self.compensation, memo),
        )
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        take_over_writes(self, look=True)
        data = self.values() if self.owner.settings.keeps_masters else None
        return rebuild_master, (data, self.model_param, self.owner, self.compensation)


class Made:
    """How many masters were made in this process: whoever keeps a list of them looks again when it has changed."""

    count = 0


class MasterParameter(Master, nn.Parameter):  # type: ignore[misc]
    """A `Master` on one device."""


def make_master(data: Tensor, model_param: Tensor, owner: Owner, compensation: Tensor | None = None) -> Master:
    """Make the master of a parameter, and let gradients that are sums be float32.

    Args:
        data: Its values, float32; they are not copied. A DTensor if ``model_param`` is one.
        model_param: The parameter of the model, of the same shape.
        owner: What it shares with the others.
        compensation: As the attribute.

    Returns:
        The master; `master_of` finds it while it lives.
    """
    made: Any
    if type(data) is Tensor or type(data) is nn.Parameter:
        # Not `detach`, which shares the counter of writes: writes to the model and to the master are told apart by it.
        made = torch.Tensor._make_subclass(MasterParameter, data.data, True)
    else:
        made = data.detach()[...]
        made.__class__ = _distributed_class(type(made))  # type: ignore[arg-type]
    made.model_param, made.owner, made.compensation = model_param, owner, compensation
    made.seen = made.loaded = made.unlink = None
    made.adds, made.written = False, made._version
    links[id(model_param)] = made
    Made.count += 1
    link_gradients(made)
    # Copies and pickles of masters come here too, in processes where nothing was prepared.
    from .hooks import watch_steps  # noqa: PLC0415 - it needs this module

    watch_steps()
    return made  # type: ignore[no-any-return]


def master_of(parameter: Tensor) -> Master | None:
    """Give the master of a model's parameter; None if it has none."""
    found = links.get(id(parameter))
    return found if found is not None and found.model_param is parameter else None


def masters_in(optimizer: torch.optim.Optimizer) -> list[Master]:
    """List the masters that an optimizer holds, in the order of its ``param_groups``."""
    return [one for group in optimizer.param_groups for one in group["params"] if isinstance(one, Master)]


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Iterate what an optimizer updates: float32 masters, and the parameters that have none.

    Args:
        optimizer: Any optimizer, prepared or not.

    Returns:
        The tensors in the order of its ``param_groups``. Of parameters with a compensation, or rounded stochastically
        without masters, that is the model's parameter: between steps there is nothing in float32.

    Example:
        >>> import mezzo.torch
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = mezzo.torch.prepare(model, optimizer)
        >>> [str(one.dtype) for one in model[0].parameters()]
        ['torch.bfloat16', 'torch.bfloat16']
        >>> {str(one.dtype) for one in master_params(optimizer)}
        {'torch.float32'}
    """
    for group in optimizer.param_groups:
        for one in group["params"]:
            hidden = isinstance(one, Master) and not one.owner.settings.keeps_masters
            yield one.model_param if hidden else one


@torch.no_grad()
def take_over_writes(master: Master, *, look: bool = False) -> None:
    """Let the master have what was written to the model's parameter since the last step: whoever writes there means it.

    A value that the master rounds to is left: loading the parameter's own values does not cost the master its precision.

    Args:
        master: The master.
        look: Whether to compare values in any case: some writes, as to ``parameter.data``, leave no trace.
    """
    parameter, settings = master.model_param, master.owner.settings
    if master.values().device != parameter.device:
        master.put(master.values().to(parameter.device))
        if master.compensation is not None:
            master.compensation = master.compensation.to(parameter.device)
    now, before, loaded = state_of(parameter), master.seen, master.loaded
    # A master that has been written to, and not shown to the model yet, is ahead of it.
    ahead = master._version != master.written
    if now == before and (ahead or not (look and settings.keeps_masters)):
        return
    master.seen, master.loaded = now, None
    low = local(parameter.detach())
    if settings.keeps_masters:
        values = local(master.values())
        known = may_come_from(low, values) if settings.rounds_at_random else values.to(low.dtype) == low
        if loaded is not None:
            known |= local(loaded) == low
        values.copy_(torch.where(known, values, low))
    elif master.compensation is not None and loaded is not None:
        local(master.compensation).masked_fill_(local(loaded) != low, 0)
    elif master.compensation is not None and before is not None:
        # Without the weight that it belongs to, nothing is known of it. A copy came with its own.
        local(master.compensation).zero_()


def rebuild_master(data: Tensor | None, model_param: Tensor, owner: Owner, compensation: Tensor | None) -> Master:
    """Make a master that comes out of a pickle; arguments as in `make_master`, ``data`` None if it has no values."""
    return make_master(no_values(model_param) if data is None else data, model_param, owner, compensation)


def state_of(parameter: Tensor) -> tuple[int, int]:
    """Give what changes when somebody writes to a parameter: the version counter and the address."""
    return parameter._version, local(parameter).data_ptr()


def no_values(parameter: Tensor) -> Tensor:
    """Give what stands for the values of a master between steps, where there are none: NaN, in no memory."""
    held, whole = local(parameter), cast(Any, parameter)
    empty = torch.full((), torch.nan, device=held.device).expand(held.shape)
    if held is parameter or not hasattr(parameter, "placements"):
        return empty
    made: Any = type(parameter.detach())
    shape = {"shape": whole.shape, "stride": whole.stride()}
    return made.from_local(empty, whole.device_mesh, whole.placements, run_check=False, **shape)  # type: ignore[no-any-return]


@lru_cache(maxsize=8)
def _distributed_class(tensor_class: type) -> type:
    return type(f"Master{tensor_class.__name__}", (Master, tensor_class), {})
