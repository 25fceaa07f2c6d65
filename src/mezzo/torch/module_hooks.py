"""The hooks by which a module's policy is put in force and taken away; the work of `mezzo.torch.set_precision`.

The hooks are plain objects that copy and pickle with the module. What a call has found is kept per thread, so a module may
be called from its own forward or from several threads.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from mezzo.builtin import builtin_policy
from mezzo.policy import Policy
from mezzo.rules import Rule
from mezzo.torch import graphs
from mezzo.torch.active import slot_for
from mezzo.torch.autocast import autocast
from mezzo.torch.cache import at_region_end
from mezzo.torch.eager import not_compiled_alone
from mezzo.torch.trees import map_tensors

__all__ = ["ModuleHook", "ModuleRule", "Overrides", "hook_of", "leave_interrupted_modules", "policy_under"]

Overrides = tuple[tuple[str, Rule], ...]
"""Op to rule, to be laid over the policy around the module."""

ModuleRule = Policy | Overrides
"""What a module follows."""

_LOW = frozenset({torch.bfloat16, torch.float16})
_FP32 = builtin_policy("fp32")


class ModuleHook:
    """The hooks of one module; what a model keeps of `set_precision` when it is copied or pickled.

    Attributes:
        rules: The call that set it, and a policy or overrides, the one in force last.
        entered: Whether a forward has run in a region since the last rule was set.
        handles: PyTorch's handles of the two hooks. Kept here so that a model out of a file brings its hooks' numbers along
            and hooks that are added to it later get others.
    """

    def __init__(self, module: nn.Module) -> None:
        self.rules: list[tuple[str, ModuleRule]] = []
        self.entered = False
        # What code has entered that Dynamo traces: regions, and how many of them in one call.
        self._traced: list[Any] = []
        self._entered_in_graph: list[int] = []
        self.handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.after, always_call=True),
        ]

    def set(self, call: str, rule: ModuleRule) -> None:
        """Follow a rule from now on."""
        self.rules.append((call, rule))
        self.entered = False

    def drop(self, call: str | None) -> None:
        """Forget what one call has set, or all; without rules the hooks go."""
        self.rules[:] = [rule for rule in self.rules if call is not None and rule[0] != call]
        if not self.rules:
            for handle in self.handles:
                handle.remove()

    @not_compiled_alone
    def before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enter the module's policy on every device that has an enabled region, and cast the inputs of an fp32 module."""
        devices = [device for device in _device_types() if torch.is_autocast_enabled(device)]
        rule = self.rules[-1][1]
        if is_dynamo_compiling():
            self._enter_in_graph(rule, devices)
        elif devices:
            regions = [_region(rule, device) for device in devices]
            if leave_interrupted_modules not in at_region_end:
                at_region_end.append(leave_interrupted_modules)
            _open.entries.append((self, [(region, _enter(region)) for region in regions]))
        if not devices:
            return None
        self.entered = True
        if rule != _FP32:
            return None

        def raised(tensor: Tensor) -> Tensor:
            return tensor.float() if tensor.dtype in _LOW and tensor.device.type in devices else tensor

        return tuple(map_tensors(raised, value) for value in args), {
            name: map_tensors(raised, value) for name, value in kwargs.items()
        }

    @not_compiled_alone
    def after(self, _module: nn.Module, _args: object, _output: object) -> None:
        """Leave what `before` has entered, and what modules inside have left open when they were interrupted."""
        if is_dynamo_compiling():
            for _ in range(self._entered_in_graph.pop()):
                graphs.leave_in_graph(self)
            return
        # There is none outside of regions, and if a hook that runs earlier than `before` has raised.
        if any(hook is self for hook, _ in _open.entries):
            while _leave_last() is not self:
                pass

    def _enter_in_graph(self, rule: ModuleRule, devices: list[str]) -> None:
        self._entered_in_graph.append(len(devices))
        if not devices:
            return
        if not graphs._may_be_entered(self):
            graphs._break_graph()
        for device in devices:
            graphs._enter(self, _entry(rule, device))


def _device_types() -> tuple[str, ...]:
    # Not all that PyTorch has a flag for: no build can run maia and ipu, and xla brings rules of its own.
    return ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", torch._C._get_privateuse1_backend_name())


class _Open(threading.local):
    """A thread's entered modules, the innermost last."""

    def __init__(self) -> None:
        self.entries: list[tuple[ModuleHook, list[tuple[autocast, bool]]]] = []
        self.leaving = False


_open = _Open()


def _enter(region: autocast) -> bool:
    """Enter a region without adding to the nesting, and say whether that went.

    PyTorch calls no hook when a forward ends by an exception that is no `Exception`, such as KeyboardInterrupt. With the
    nesting as it was, the region around still knows that it is the outermost one, and drops the casts of weights.
    """
    region.__enter__()
    if torch.autocast_decrement_nesting() > 0:
        return True
    torch.autocast_increment_nesting()  # no region around: the flag was set by hand, or carried into a backward thread
    return False


def _leave_last() -> ModuleHook:
    hook, regions = _open.entries.pop()
    for region, hidden in reversed(regions):
        if hidden:
            torch.autocast_increment_nesting()
        region.__exit__(None, None, None)
    return hook


def leave_interrupted_modules() -> None:
    """Leave the modules that this thread has entered and that PyTorch called no hook for, once no region is open.

    It is for whoever hears of the end of a thread's outermost region, just before that restores its own state.
    """
    if not _open.entries or _open.leaving:
        return
    torch.autocast_increment_nesting()
    if torch.autocast_decrement_nesting() == 0:
        # To leave one ends a region, which would call this again for the modules around it.
        _open.leaving = True
        try:
            while _open.entries:
                _leave_last()
        finally:
            _open.leaving = False


def hook_of(module: nn.Module) -> ModuleHook | None:
    """Give the hooks that a module has, None if it has none of these."""
    for function in module._forward_pre_hooks.values():
        hook = getattr(function, "__self__", None)
        if isinstance(hook, ModuleHook):
            return hook
    return None


def policy_under(rule: ModuleRule, device_type: str) -> Policy:
    """Give the policy that a rule makes of the one in force on a device."""
    if isinstance(rule, Policy):
        return rule
    around = slot_for(device_type).current().policy
    return _overridden(around, around.name, rule)


def _region(rule: ModuleRule, device_type: str) -> autocast:
    return autocast(device_type, policy=policy_under(rule, device_type))


def _entry(rule: ModuleRule, device_type: str) -> graphs.Entry:
    return graphs._entry(_region(rule, device_type))


# As torch.compiler.assume_constant_result does, which imports Dynamo. While code is traced, what is in force is known.
_entry._dynamo_marked_constant = True  # type: ignore[attr-defined]
_device_types._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=256)
def _overridden(policy: Policy, name: str, overrides: Overrides) -> Policy:  # noqa: ARG001 - equal policies differ in name
    return policy.override(dict(overrides))
