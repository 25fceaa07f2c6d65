"""`set_precision`: a policy for single modules of a model, found by name."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from mezzo.builtin import PolicyLike, resolve_policy
from mezzo.decision import CastPolicy
from mezzo.errors import PolicyError, UnknownOpError, UnknownPolicyError
from mezzo.rules import RuleLike, resolve_rules
from mezzo.torch.module_hooks import ModuleHook, ModuleRule, hook_of, policy_under
from mezzo.torch.module_names import Found, find_modules, named_modules
from mezzo.torch.policies import active_for

__all__ = ["Precision", "clear_precision", "set_precision"]

_calls = itertools.count()


class Precision:
    """What `set_precision` has set; also a context manager that removes it at the end.

    Attributes:
        matched: Pattern to the names of the modules that it set, in the model's order.
        skipped: Name to reason for the modules that a pattern matched along with others, and whose forward is never called.
    """

    def __init__(self, matched: Mapping[str, tuple[str, ...]], skipped: Mapping[str, str]) -> None:
        self.matched = MappingProxyType(dict(matched))
        self.skipped = MappingProxyType(dict(skipped))
        self._modules: dict[str, nn.Module] = {}
        self._call = f"{os.getpid()}.{next(_calls)}"

    def remove(self) -> None:
        """Take the rules away again, from this model and not from its copies; twice is as good as once."""
        for module in self._modules.values():
            hook = hook_of(module)
            if hook is not None:
                hook.drop(self._call)
        self._modules = {}

    def unused(self) -> tuple[str, ...]:
        """Name the modules whose forward has not run in a region since; after a step, those on which the rules do nothing.

        It cannot be seen beforehand that a module's parent reads its weights and never calls it.
        """
        hooks = {name: hook_of(module) for name, module in self._modules.items()}
        return tuple(name for name, hook in hooks.items() if hook is not None and not hook.entered)

    def __enter__(self) -> Precision:
        """Give itself; the rules are in force since the call."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Call `remove`."""
        self.remove()

    def __repr__(self) -> str:
        return f"Precision({dict(self.matched)!r})"


def set_precision(model: nn.Module, rules: Mapping[str, PolicyLike | Mapping[str, RuleLike]]) -> Precision:
    """Set the policy of single modules, by glob patterns over their names.

    Inside an enabled autocast region, mezzo's or PyTorch's, the policy of a module rules while its ``forward`` runs, in the
    modules that it calls too, unless they have a policy of their own. Outside of a region nothing changes. The model is not
    rewritten: it deep-copies, pickles and compiles as before, the rules going along, and its ``state_dict`` is the same.

    Args:
        model: The model. In a wrapper (DDP, FSDP, `torch.compile`) the names are those of the model inside.
        rules: Pattern to rule. In a pattern ``*`` stands for anything within one part of a dotted name, ``**`` for any
            number of parts; ``""`` is the model itself. A rule is a policy as `mezzo.torch.autocast` takes it, or a mapping
            from op to cast policy, which changes these ops in the policy that is in force around the module when it is
            called. A module with the policy ``"fp32"`` also casts the bfloat16 and float16 tensors among its arguments, in
            any pytree, to float32. Of several patterns that match a module the last one counts; a later call wins over an
            earlier one, whose rule is back once the later one is removed.

    Returns:
        A `Precision`: which modules each pattern matched, and ``remove()``.

    Raises:
        UnknownModuleError: A pattern matches no module, or only modules whose forward is never called, such as
            ``nn.MultiheadAttention.out_proj`` or an ``nn.ModuleList``. Nothing is then set.
        UnknownPolicyError: A rule is a string that names no policy.
        UnknownOpError: A rule names an op that PyTorch does not have.
        PolicyError: A rule is none, is an empty mapping, or cannot be applied to its op.
        TypeError: ``model`` is no module, or ``rules`` no mapping.

    Set it before a compiled model is called for the first time: compiled code does not ask for new hooks. Not to be called
    while another thread runs the model.

    Example:
        >>> import torch
        >>> from mezzo.torch import autocast, set_precision
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> placed = set_precision(net, {"2": "fp32"})
        >>> placed.matched["2"]
        ('2',)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     print(net[0](torch.ones(1, 4)).dtype, net(torch.ones(1, 4)).dtype)
        torch.bfloat16 torch.float32
        >>> placed.remove()
    """
    if not isinstance(model, nn.Module):
        msg = f"set_precision takes a torch.nn.Module, got {type(model).__name__}."
        raise TypeError(msg)
    if not isinstance(rules, Mapping):
        msg = f"set_precision takes a mapping from name pattern to policy or rules, got {type(rules).__name__}."
        raise TypeError(msg)
    modules = named_modules(model)
    found: dict[str, list[Found]] = {}
    chosen: dict[int, tuple[Found, ModuleRule]] = {}
    for pattern, rule in rules.items():
        if not isinstance(pattern, str):
            msg = f"set_precision: name patterns are strings, got {pattern!r}."
            raise TypeError(msg)
        found[pattern] = find_modules(pattern, modules)
        parsed = _parse(pattern, rule)
        chosen.update({id(one.module): (one, parsed) for one in found[pattern] if not one.idle})
    placed = Precision(
        {pattern: tuple(one.name for one in all_of if not one.idle) for pattern, all_of in found.items()},
        {one.name: one.idle for all_of in found.values() for one in all_of if one.idle},
    )
    for one, parsed in chosen.values():
        hook = hook_of(one.module) or ModuleHook(one.module)
        hook.set(placed._call, parsed)
        placed._modules[one.name] = one.module
    return placed


def clear_precision(model: nn.Module) -> None:
    """Take away all that `set_precision` has set on a model, be it a copy or out of a file.

    Args:
        model: The model, or a part of one.

    Raises:
        TypeError: ``model`` is no module.

    Example:
        >>> import copy
        >>> net = nn.Sequential(nn.Linear(4, 4))
        >>> placed = set_precision(net, {"0": "fp32"})
        >>> twin = copy.deepcopy(net)
        >>> clear_precision(twin)
        >>> len(twin[0]._forward_pre_hooks), len(net[0]._forward_pre_hooks)
        (0, 1)
    """
    if not isinstance(model, nn.Module):
        msg = f"clear_precision takes a torch.nn.Module, got {type(model).__name__}."
        raise TypeError(msg)
    for module in model.modules():
        hook = hook_of(module)
        if hook is not None:
            hook.drop(None)


def _parse(pattern: str, rule: object) -> ModuleRule:
    """Check one rule: the names in it, and that its policy can be put in force on this machine."""
    try:
        if isinstance(rule, Mapping):
            if not rule:
                msg = (
                    "{} names no op, so it would change nothing; write {'softmax': 'fp32'} with the ops that you mean."
                )
                raise PolicyError(msg)
            overrides = tuple(resolve_rules(rule, "torch").items())
            active_for(policy_under(overrides, "cpu"), "cpu")
            return overrides
        if rule in set(CastPolicy) - {CastPolicy.FP32}:  # "fp32" is a policy too
            msg = f"{str(rule)!r} is a rule for an op; write {{'softmax': {str(rule)!r}}} with the ops that you mean."
            raise PolicyError(msg)
        policy = resolve_policy(rule)  # type: ignore[arg-type]  # it checks
        active_for(policy, "cpu")
    except (PolicyError, UnknownPolicyError, UnknownOpError) as error:
        hint = " Did you mean 'fp32'?" if str(rule) in ("float32", "torch.float32") else ""
        msg = f"rule for {pattern!r}: {error}{hint}"
        raise type(error)(msg) from None
    return policy
