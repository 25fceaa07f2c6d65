"""Which parameters of a model can be stored in a lower precision: those that every op casts there anyway.

A parameter is stored low if each op that reads it, by the type of the modules that own it (`parameter_readers`), casts its
inputs to the lower precision under the policy in force for that module. Selectors overrule this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from mezzo.builtin import PolicyLike, resolve_policy
from mezzo.decision import CastPolicy
from mezzo.errors import PreparationError
from mezzo.policy import Policy
from mezzo.torch.active import slot_for
from mezzo.torch.module_hooks import hook_of
from mezzo.torch.module_names import named_modules
from mezzo.torch.plans import device_rules
from mezzo.torch.policies import region_default
from mezzo.vocabulary import base_name

from .parameter_readers import Reader, reader_of
from .parameter_selectors import (
    Entry,
    Selector,
    buffer_entries,
    described,
    parameter_entries,
    parse_selectors,
    select,
)

__all__ = ["Choice", "Selector", "choose", "choose_buffers"]

_STORABLE = frozenset({torch.float32, torch.float64})
"""What can be stored low at all. Complex numbers, integers and float8 mean something else; the rest is low already."""


@dataclass(frozen=True)
class Choice:
    """What is decided about one parameter.

    Attributes:
        name: Its first name, as ``model.named_parameters()`` gives it.
        names: All its names, as in ``model.state_dict()``; several if modules share it.
        parameter: The parameter.
        low: Whether it is to be stored in the lower precision.
        reason: Why, in a short sentence.
    """

    name: str
    names: tuple[str, ...]
    parameter: nn.Parameter
    low: bool
    reason: str


def choose(model: nn.Module, dtype: torch.dtype, policy: PolicyLike | None, low: object, keep: object) -> list[Choice]:
    """Decide for each floating-point parameter of a model whether it is stored in a lower precision.

    Nothing is changed. Safe in any thread, as long as none changes the model.

    Args:
        model: The model. Rules of `mezzo.torch.set_precision` on its modules count.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        policy: As `mezzo.torch.autocast` takes it; None for what a region that names none would have here and now.
        low: Selectors of what is stored low whatever reads it: a glob pattern, a module class, a function
            ``f(name, module, parameter) -> bool``, or a sequence of these. In a pattern ``*`` stands for anything within
            one part of a dotted name and ``**`` for any number of parts; the name of a module takes all below it. A class
            takes the parameters of its modules and not of those inside. float64 goes low by a selector alone.
        keep: Selectors of what stays as it is; they win over ``low``.

    Returns:
        One choice per parameter, in the model's order.

    Raises:
        PreparationError: A selector is none, or names nothing; for ``low``, or only what is never stored low; or a parameter
            has no shape yet.
        UnknownPolicyError: ``policy`` is a string that names no policy.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        >>> for choice in choose(net, torch.bfloat16, None, (), "0.bias"):
        ...     print(choice.name, choice.low, choice.reason)
        0.weight True linear runs in lower precision
        0.bias False kept by '0.bias'
        1.weight False layer_norm does not run in lower precision
        1.bias False layer_norm does not run in lower precision
    """
    entries = parameter_entries(model)
    lowered, kept = _selected(low, keep, model, entries, buffer_entries)
    in_force = _policies_of(model, policy)
    owners: dict[int, list[Entry]] = {}
    for entry in entries:
        owners.setdefault(id(entry.tensor), []).append(entry)

    def decide(parameter: nn.Parameter) -> tuple[bool, str]:
        key = id(parameter)
        if key in kept:
            return False, f"kept by {described(kept[key])}"
        if parameter.dtype not in _STORABLE:
            return False, f"{_name(parameter.dtype)} is never stored in another dtype"
        if key in lowered:
            return True, f"selected by {described(lowered[key])}"
        if parameter.dtype is not torch.float32:
            return False, f"{_name(parameter.dtype)} is kept unless it is selected"
        return _by_policy(owners[key], in_force, _name(dtype))

    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point():
            names.setdefault(id(parameter), []).append(name)
            parameters[id(parameter)] = parameter
    return [Choice(names[key][0], tuple(names[key]), each, *decide(each)) for key, each in parameters.items()]


def choose_buffers(model: nn.Module, low: object, keep: object) -> list[tuple[nn.Module, str, str]]:
    """Give the floating-point buffers that ``low`` selects and ``keep`` does not. No policy says anything about buffers.

    Args:
        model: The model; nothing is changed.
        low: As in `choose`. A function is given the buffer in the place of the parameter.
        keep: As in `choose`.

    Returns:
        Module, the buffer's name there, and its full name as ``model.named_buffers()`` gives it; each once.

    Raises:
        PreparationError: As in `choose`.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
        >>> [name for _, _, name in choose_buffers(net, "**", ())]
        ['1.running_mean', '1.running_var']
        >>> choose_buffers(net, "**", nn.BatchNorm1d)
        []
    """
    entries = buffer_entries(model)
    lowered, kept = _selected(low, keep, model, entries, parameter_entries)
    paths: dict[int, str] = {}
    for path, module in model.named_modules():
        paths[id(module)] = f"{path}." if path else ""
    found: dict[tuple[int, str], tuple[nn.Module, str, str]] = {}
    for entry in entries:
        key, module = id(entry.tensor), entry.module
        if key in lowered and key not in kept and entry.tensor.dtype in _STORABLE:
            found[id(module), entry.attribute] = (module, entry.attribute, paths[id(module)] + entry.attribute)
    return list(found.values())


def _selected(
    low: object, keep: object, model: nn.Module, entries: list[Entry], others: Callable[[nn.Module], list[Entry]]
) -> tuple[dict[int, Selector], dict[int, Selector]]:
    """Find what ``low`` and ``keep`` select; refuse what of ``low`` selects only what stays as it is all the same."""
    lowered: dict[int, Selector] = {}
    for selector in parse_selectors("low", low):
        found = select("low", [selector], model, entries, others)
        named = [entry for entry in entries if id(entry.tensor) in found]
        if named and not any(entry.tensor.dtype in _STORABLE for entry in named):
            first = named[0]
            msg = (
                f"low={described(selector)} names only what is never stored in another dtype: {first.name!r} is "
                f"{_name(first.tensor.dtype)}. Allowed are float32 and float64; leave the selector out."
            )
            raise PreparationError(msg)
        lowered = {**found, **lowered}
    return lowered, select("keep", parse_selectors("keep", keep), model, entries, others)


def _policies_of(model: nn.Module, policy: PolicyLike | None) -> Callable[[str, str], Policy]:
    """Give the function from a module's name and a device type to the policy that is in force in its forward."""
    given = None if policy is None else resolve_policy(policy)
    rules = {found.name: hook.rules[-1][1] for found in named_modules(model) if (hook := hook_of(found.module))}

    @cache
    def in_force(path: str, device_type: str) -> Policy:
        if path:
            around = in_force(path.rpartition(".")[0], device_type)
        else:
            around = given or region_default(slot_for(device_type)).policy
        rule = rules.get(path, ())
        if isinstance(rule, Policy):
            return rule
        return around.override(dict(rule)) if rule else around

    return in_force


def _by_policy(owned: list[Entry], in_force: Callable[[str, str], Policy], low: str) -> tuple[bool, str]:
    """Ask each op that reads a parameter; the reason is that of the first that refuses, else that of the first of all."""
    reasons: list[str] = []
    for entry in owned:
        reader = reader_of(entry.module, entry.attribute, entry.parent)
        if isinstance(reader, str):
            return False, _as(reader, entry, owned)
        device_type = _device_type(entry.tensor)
        rules = device_rules(device_type, low)
        policy = in_force(entry.path, device_type)
        op, is_low = _runs_low(reader, policy, rules, device_type, low)
        plain = base_name(op).rpartition("::")[2]
        if not is_low:
            return False, _as(reader.refusal or f"{plain} does not run in lower precision", entry, owned)
        reasons.append(f"{plain} runs in lower precision")
    return True, reasons[0]


def _as(reason: str, entry: Entry, owned: list[Entry]) -> str:
    """Add the name under which a shared parameter is read so, if it is not the one that is shown."""
    return reason if entry is owned[0] else f"{reason}, as {entry.name!r}"


def _runs_low(
    reader: Reader, policy: Policy, rules: Mapping[str, CastPolicy], device_type: str, low: str
) -> tuple[str, bool]:
    """Give the op that decides about a parameter, and whether it casts it to the lower precision."""

    def rule_of(op: str) -> CastPolicy:
        rule = policy.rule_of(op, low)
        return rules.get(op, CastPolicy.FALLTHROUGH) if rule == "device" else CastPolicy(rule)

    rule = rule_of(reader.op)
    if rule is CastPolicy.FALLTHROUGH and reader.inside and reader.inside_on in ("", device_type):
        inside = rule_of(reader.inside)
        if inside is not CastPolicy.FALLTHROUGH:
            return reader.inside, inside is CastPolicy.LOWER_PRECISION_FP
    return reader.op, rule is CastPolicy.LOWER_PRECISION_FP


def _device_type(tensor: Tensor) -> str:
    """Name the device whose table counts. Without memory yet, a parameter will go to the accelerator, if there is one."""
    if tensor.device.type != "meta":
        return tensor.device.type
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
