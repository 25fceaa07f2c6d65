"""The cast policies at work: for each, the function that casts an op's inputs and runs the op.

If a reader asks who casts an op that mezzo serves, the answer is one of these eight functions; which of them, the plan in
`mezzo.torch.plans` says. While an action runs, autocast is off for its device, so the ops inside are not cast again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mezzo.decision import CastPolicy
from mezzo.errors import BannedOpError, PolicyError
from mezzo.torch.cache import is_fresh, kept_casts
from mezzo.torch.casting import COMPUTED, Cast, Device, common_dtype
from mezzo.torch.ops import OpSpec, find_overload
from mezzo.vocabulary import base_name, vocabulary

__all__ = ["Action", "action_for", "call_of"]

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
Action = Callable[[Arguments, Keywords, torch.dtype], Any]
"""Runs an op with its arguments cast as a rule says, in a region of the given dtype."""

# PyTorch's own words; people search for them.
_BINARY_CROSS_ENTROPY_ADVICE = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)


def action_for(rule: CastPolicy, spec: OpSpec, device: Device, policy_name: str) -> Action:
    """Make the action that applies a rule to an op on a device.

    Args:
        rule: The cast policy.
        spec: The op.
        device: Where it runs.
        policy_name: For the message of a banned op.

    Returns:
        The action.

    Raises:
        PolicyError: The op's schema has no room for the rule.
    """
    if rule is CastPolicy.BANNED:
        return _banned(spec, policy_name)
    if rule is CastPolicy.BANNED_LOWER_PRECISION:
        return _banned_lower_precision(spec, policy_name)
    if rule is CastPolicy.FALLTHROUGH:
        return _fallthrough(spec)
    if rule is CastPolicy.FP32_SET_OPT_DTYPE:
        return _fp32_set_opt_dtype(spec, device)
    if rule is CastPolicy.FP32_APPEND_DTYPE:
        return _fp32_append_dtype(spec, device)
    if spec.mutates:
        msg = (
            f"{spec.name} writes into an argument, so its inputs cannot be cast; allowed are banned, "
            "banned_lower_precision and fallthrough."
        )
        raise PolicyError(msg)
    makers = {
        CastPolicy.LOWER_PRECISION_FP: _lower_precision_fp,
        CastPolicy.FP32: _fp32,
        CastPolicy.PROMOTE: _promote,
    }
    return makers[rule](spec, device)


# Ops with several overloads of which these arguments can only mean the first.
_UNAMBIGUOUS = frozenset(
    f"aten::{name}" for name in ("mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "sum.dim_IntList")
)


def call_of(spec: OpSpec) -> Callable[..., Any]:
    """Find the fastest way to call an overload.

    PyTorch's Python binding of an op parses arguments faster than the generic call of an overload does, the more the more
    there are. It chooses among the overloads itself, so it is taken where there is one to choose. Not for losses: a call
    that comes through the dispatcher has no argument that equals the schema's default, and the bindings have another
    default for `reduction` than the schema. Nor with indices of which some may be left out: the bindings refuse None there.
    """
    base = base_name(spec.name)
    single = spec.name in _UNAMBIGUOUS or vocabulary("torch").covers(base) == (spec.name,)
    arguments = spec.overload._schema.arguments
    if single and not any(a.name == "reduction" or str(a.type) == "List[Optional[Tensor]]" for a in arguments):
        plain = base.removeprefix("aten::")
        for namespace in (torch._C._VariableFunctions, torch._C._nn):
            if callable(binding := getattr(namespace, plain, None)):
                return binding  # type: ignore[no-any-return]
    # `_op` is what OpOverload.__call__ calls in turn; one Python frame less.
    return getattr(spec.overload, "_op", spec.overload)  # type: ignore[no-any-return]


def _casting(spec: OpSpec, cast: Cast, fixed: torch.dtype | None) -> Action:
    """Make the action that casts every tensor: to one dtype, or for None to the region's."""
    call = call_of(spec)
    if spec.leading_tensors == 2:
        return _casting_two(call, cast) if fixed is None else _casting_two_to(call, cast, fixed)
    cast_all = _caster(spec, cast)

    def action(args: Arguments, kwargs: Keywords, low_dtype: torch.dtype) -> Any:
        cast_args, cast_kwargs = cast_all(args, kwargs, fixed or low_dtype)
        return call(*cast_args, **cast_kwargs)

    return action


def _casting_two(call: Callable[..., Any], cast_weight: Cast) -> Action:
    """Make the action of every linear, matmul and convolution in a lower precision: two tensors, and perhaps a third.

    It is the one whose speed is felt, so it looks up kept casts itself, without a call for each.
    """

    def action(args: Arguments, kwargs: Keywords, low_dtype: torch.dtype) -> Any:
        kept = kept_casts(low_dtype)
        new = list(args)
        for place, value in enumerate(args[:3]):
            # Not a tensor: one that is left out, or a number that PyTorch takes in the place of one.
            if not isinstance(value, Tensor) or value.dtype is low_dtype:
                continue
            if kept is not None and (entry := kept.get(id(value))) is not None and is_fresh(entry, value):
                new[place] = entry[2]
            else:
                new[place] = cast_weight(value, low_dtype)
        return call(*new, **kwargs)

    return action


def _casting_two_to(call: Callable[..., Any], cast: Cast, target: torch.dtype) -> Action:
    def action(args: Arguments, kwargs: Keywords, _: torch.dtype) -> Any:
        new = list(args)
        for place, value in enumerate(args[:3]):
            if isinstance(value, Tensor) and value.dtype is not target:
                new[place] = cast(value, target)
        return call(*new, **kwargs)

    return action


def _lower_precision_fp(spec: OpSpec, device: Device) -> Action:
    return _casting(spec, device.cast_weight, None)


def _fp32(spec: OpSpec, device: Device) -> Action:
    return _casting(spec, device.cast, torch.float32)


def _only_tensors_are_cast(spec: OpSpec) -> bool:
    """Say whether every tensor argument is a positional tensor that may be cast, so that no list of places is needed."""
    return not (spec.tensor_lists or spec.keyword_tensors or spec.uncast)


def _promote(spec: OpSpec, device: Device) -> Action:
    call = call_of(spec)
    cast_all = _caster(spec, device.cast)
    eligible = device.eligible
    places = [index for index, _ in (*spec.tensors, *spec.tensor_lists)]

    def action(args: Arguments, kwargs: Keywords, low_dtype: torch.dtype) -> Any:
        given = len(args)
        dtypes = set()
        for place in places:
            value = args[place] if place < given else None
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if eligible(tensor):
                    dtypes.add(tensor.dtype)
        if dtypes and not (len(dtypes) == 1 and dtypes <= COMPUTED):
            cast_args, cast_kwargs = cast_all(args, kwargs, common_dtype(dtypes, low_dtype))
            return call(*cast_args, **cast_kwargs)
        return call(*args, **kwargs)

    return action


def _fp32_set_opt_dtype(spec: OpSpec, device: Device) -> Action:
    call = call_of(spec)
    eligible = device.eligible
    place = spec.dtype
    if place is None:
        msg = f"{spec.name} has no optional dtype argument for fp32_set_opt_dtype to set; use fp32."
        raise PolicyError(msg)

    def action(args: Arguments, kwargs: Keywords, _: torch.dtype) -> Any:
        if not eligible(args[0]) or kwargs.get("dtype") is not None:
            return call(*args, **kwargs)
        if spec.dtype_keyword_only or len(args) <= place:
            return call(*args, **{**kwargs, "dtype": torch.float32})
        if args[place] is not None:
            return call(*args, **kwargs)
        return call(*args[:place], torch.float32, *args[place + 1 :], **kwargs)

    return action


def _fp32_append_dtype(spec: OpSpec, device: Device) -> Action:
    typed = find_overload({"aten::norm.Scalar": "aten::norm.ScalarOpt_dtype"}.get(spec.name, f"{spec.name}_dtype"))
    if typed is None:
        msg = f"{spec.name} has no overload with a dtype for fp32_append_dtype to call; use fp32."
        raise PolicyError(msg)
    defaults = spec.positional_defaults
    eligible = device.eligible

    def action(args: Arguments, kwargs: Keywords, _: torch.dtype) -> Any:
        # Defaults have been left out of the call that came; the other overload has none.
        kwargs = dict(kwargs)
        whole = [*args, *(kwargs.pop(name, default) for name, default in _rest(len(args)))]
        dtype = torch.float32 if eligible(args[0]) else args[0].dtype
        return typed(*whole, **kwargs, dtype=dtype)

    names = [argument.name for argument in spec.overload._schema.arguments if not argument.kwarg_only]

    def _rest(given: int) -> list[tuple[str, Any]]:
        return list(zip(names[given:], defaults[given:], strict=True))

    return action


def _fallthrough(spec: OpSpec) -> Action:
    call = call_of(spec)

    def action(args: Arguments, kwargs: Keywords, _: torch.dtype) -> Any:
        return call(*args, **kwargs)

    return action


def _banned(spec: OpSpec, policy_name: str) -> Action:
    def action(*_: Any) -> Any:
        if spec.name == "aten::binary_cross_entropy":
            raise BannedOpError(_BINARY_CROSS_ENTROPY_ADVICE)
        msg = (
            f"{spec.name} is banned by the policy {policy_name!r}. Run it in a region with enabled=False, or use a policy "
            f"that allows it: policy.override({{{spec.name!r}: 'fp32'}})."
        )
        raise BannedOpError(msg)

    return action


def _banned_lower_precision(spec: OpSpec, policy_name: str) -> Action:
    call = call_of(spec)
    more = ""
    if spec.name == "aten::binary_cross_entropy":
        more = f"\n{_BINARY_CROSS_ENTROPY_ADVICE}"
        if policy_name.startswith("apex-o1"):
            more += "\nWith mezzo.apex: amp.register_float_function(torch, 'sigmoid') before amp.initialize."

    def action(args: Arguments, kwargs: Keywords, _: torch.dtype) -> Any:
        if not any(_is_low(value) for value in (*args, *kwargs.values())):
            return call(*args, **kwargs)
        msg = (
            f"{spec.name} got an input in lower precision, which the policy {policy_name!r} bans. Give it float32 inputs, "
            f"or have it computed in float32: policy.override({{{spec.name!r}: 'fp32'}}).{more}"
        )
        raise BannedOpError(msg)

    return action


def _is_low(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() and value.dtype.itemsize < 4
    return isinstance(value, list | tuple) and any(_is_low(each) for each in value)


Caster = Callable[[Arguments, Keywords, torch.dtype], tuple[Sequence[Any], Keywords]]


def _caster(spec: OpSpec, cast: Cast) -> Caster:
    """Make the function that casts the tensor arguments of an op, in the shape that is fastest for it."""
    if _only_tensors_are_cast(spec):
        return lambda args, kwargs, target: (
            [cast(value, target) if isinstance(value, Tensor) else value for value in args],
            kwargs,
        )
    places = {index for index, _ in (*spec.tensors, *spec.tensor_lists)}

    def cast_value(value: Any, target: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            return cast(value, target)
        return [cast(item, target) for item in value] if isinstance(value, list | tuple) else value

    def cast_chosen(args: Arguments, kwargs: Keywords, target: torch.dtype) -> tuple[Sequence[Any], Keywords]:
        new = [cast_value(value, target) if place in places else value for place, value in enumerate(args)]
        # A new mapping: the one that came is needed again if the call fails and is repaired.
        changed = {name: cast_value(kwargs.get(name), target) for name in spec.keyword_tensors if name in kwargs}
        return new, {**kwargs, **changed}

    return cast_chosen
