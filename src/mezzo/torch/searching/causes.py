"""Why a result is not finite, and what to do about it.

What tells a lack of range from a fault of the program is the same op in float32: if that is finite, it was the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mezzo
from mezzo.builtin import builtin_names
from mezzo.report.nonfinite import OperandRange
from mezzo.torch.casting import dtype_name
from mezzo.torch.recording.listed_ops import Listed, RuleHere
from mezzo.torch.recording.numerics import is_plain
from mezzo.torch.recording.op_facts import OpFacts, is_float, tensors_of
from mezzo.torch.recording.op_places import Place, rank_here
from mezzo.vocabulary import base_name

from .checks import Counted

__all__ = ["Call", "Cause", "advice_for", "cause_of"]


class Call(NamedTuple):
    """A call of a kernel.

    Attributes:
        func: The kernel.
        facts: What is known of it.
        args: Its arguments.
        kwargs: The same by name.
        listed: The op of the list that it is a part of; None for no such.
    """

    func: Any
    facts: OpFacts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    listed: Listed | None


class Cause(NamedTuple):
    """Why a result is not finite.

    Attributes:
        kind: ``"range"``: the dtype's; ``"cast"``: the same, in a cast; ``"domain"``: the op is not defined there;
            ``"came in"``: it was so before; ``"unknown"``.
        text: In words.
        cure: What the program should do, for a domain; empty for others.
        dtype: The dtype that was too narrow.
        flows_on: Whether the result itself, computed in float32, does not fit that dtype, whatever reads it next.
    """

    kind: str
    text: str
    cure: str = ""
    dtype: str = ""
    flows_on: bool = False


def cause_of(
    call: Call, result: Tensor, gave: Counted, ranges: Sequence[OperandRange], place: Place, *, came_in: bool
) -> Cause:
    """Find out why a result is not finite.

    Args:
        call: The call, whose arguments still are what they were, but for those written in place.
        result: What is not finite: a result, or what came in.
        gave: What of it is not.
        ranges: Those of the operands.
        place: Where it belongs.
        came_in: Whether it came in.
    """
    if came_in:
        name = next((one.name for one in ranges if one.name and (one.nan or one.inf)), "")
        what = (
            f"the parameter {name}" if name else "an operand that no op here has made (data, or what was made before)"
        )
        outside = _DATA if rank_here() is None else f"{_DATA}; and {_OTHER_RANK}"
        if name and call.facts.writes:  # it is just now that the parameter gets them
            return Cause("came in", f"{gave.kind} is written into {name}, out of what no op here has made", outside)
        return Cause("came in", f"{what} has {gave.kind} already", _PARAMETER if name else outside)
    dtype = dtype_name(result.dtype)
    largest = torch.finfo(result.dtype).max
    if call.facts.is_cast or call.facts.name == "aten::copy_":
        high = max(
            (abs(bound) for one in ranges for bound in (one.low, one.high) if bound is not None), default=math.nan
        )
        return Cause(
            "cast", f"a cast to {dtype}, which ends at {largest:.5g}, of numbers up to {high:.6g}", dtype=dtype
        )
    if place.node.startswith(_ROOT_NODES) and any(one.low == 0 for one in ranges):
        text = f"the derivative of a root at 0 ({place.node})"
        return Cause("domain", text, "add an eps under the root: (x + eps).sqrt()")
    domain = _domain(call, ranges, gave)
    if domain is not None:
        return domain
    if result.dtype.itemsize < 4:
        wide = _in_float32(call)
        if wide is not None:
            return Cause("range", _too_narrow(dtype, largest, wide), dtype=dtype, flows_on=wide > largest)
    if gave.nan and any(one.inf for one in ranges):
        return Cause("domain", "Inf - Inf, 0 * Inf or the like: an operand has Inf", "look where the Inf comes from")
    if result.dtype.itemsize >= 4:
        return Cause("unknown", f"{dtype} itself is exceeded, so a wider dtype in a policy will not help")
    return Cause("unknown", f"the op gives {gave.kind} in float32 as well, or could not be tried there")


def _too_narrow(dtype: str, largest: float, wide: float) -> str:
    if wide > largest:
        return f"in float32 the result is finite, up to {wide:.4g}; {dtype} ends at {largest:.5g}"
    # What is in between was too large: a sum of squares under a root, say.
    return (
        f"in float32 the result is finite, up to {wide:.4g}; something on the way to it exceeds {dtype}'s {largest:.5g}"
    )


def _in_float32(call: Call) -> float | None:
    """Run the op in float32; give the largest absolute value of its results, None if they are not finite or it failed."""
    # What is not PyTorch's own may do anything, such as wait for other processes.
    again = isinstance(call.func, torch._ops.OpOverload) and call.func.namespace in ("aten", "prims")
    if not again or call.facts.writes or call.facts.is_random or not all(map(is_plain, _floats(call))):
        return None

    def widened(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.float() if value.is_floating_point() and value.dtype.itemsize < 4 else value
        if isinstance(value, list | tuple):
            return type(value)(map(widened, value)) if type(value) in (list, tuple) else value
        is_low = isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize < 4
        return torch.float32 if is_low else value

    try:
        args = [widened(value) for value in call.args]
        result = call.func(*args, **{name: widened(value) for name, value in call.kwargs.items()})
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return None
    largest = 0.0
    for tensor in tensors_of((result,)):
        if is_float(tensor.dtype) and tensor.numel():
            if not bool(tensor.isfinite().all()):
                return None
            largest = max(largest, float(tensor.abs().max()))
    return largest


_ROOT_NODES = ("SqrtBackward", "RsqrtBackward", "NormBackward", "LinalgVectorNormBackward", "CdistBackward")
_DATA = "look at the data and at what made it: no precision helps against it"
_OTHER_RANK = "look at what the other ranks report: gradients are added up over all of them"
_PARAMETER = (
    "an earlier step wrote it: go back to a checkpoint from before, and watch from there: "
    'GradScaler(..., on_overflow="explain"), or find_nonfinite around each step'
)
_ROOT = "clamp(min=eps) before it"


def _domain(call: Call, ranges: Sequence[OperandRange], gave: Counted) -> Cause | None:
    """Say of an op that it is not defined for what went in; None if it is."""
    name = base_name(call.facts.name).removeprefix("aten::").rstrip("_").removeprefix("_foreach_")
    first = ranges[0] if ranges else None
    low = None if first is None else first.low
    if name in ("log", "log2", "log10") and low is not None and low <= 0:
        what = "0" if low == 0 else "0 or of numbers below"
        cure = "clamp what goes in: x.clamp_min(1e-6).log(); or use log_softmax, logsumexp, xlogy"
        return Cause("domain", f"{name} of {what}", cure)
    if name == "log1p" and low is not None and low <= -1:
        return Cause("domain", "log1p of -1 or less", "clamp what goes in above -1")
    divides = name in ("div", "true_divide", "reciprocal", "rsqrt", "addcdiv") or (
        name == "pow" and _to_a_negative(call)
    )
    if divides and _has_zero(call):
        return Cause(
            "domain", f"{name} with 0 to divide by", f"add an eps that float16 can hold (1e-4, not 1e-8), or {_ROOT}"
        )
    if name in ("sqrt", "rsqrt", "acos", "asin", "acosh", "atanh", "pow") and gave.nan:
        return Cause("domain", f"{name} outside of where it is defined", f"{_ROOT}, or clamp to its domain")
    if "softmax" in name and gave.nan and any(one.inf for one in ranges):
        text = "softmax of a row in which all is -Inf: everything is masked out"
        return Cause("domain", text, "leave one position of each row unmasked, or set such rows to 0 afterwards")
    return None


def _floats(call: Call) -> list[Tensor]:
    return [one for one in tensors_of((*call.args, *call.kwargs.values())) if is_float(one.dtype)]


def _to_a_negative(call: Call) -> bool:
    exponent = call.args[1] if len(call.args) > 1 else 1
    if isinstance(exponent, Tensor):
        return is_plain(exponent) and bool((exponent < 0).any())
    return isinstance(exponent, int | float) and exponent < 0


def _has_zero(call: Call) -> bool:
    operands = [one for one in tensors_of(call.args) if is_float(one.dtype)]
    by_place = {"aten::div": 1, "aten::true_divide": 1, "aten::addcdiv": 2}
    place = by_place.get(call.facts.name.rstrip("_"), 0)
    divisors = operands[place : place + 1]
    if len(call.args) > 1 and not isinstance(call.args[1], Tensor) and call.args[1] == 0:
        return place == 1
    return any(is_plain(one) and bool((one == 0).any()) for one in divisors)


def advice_for(cause: Cause, op: str, path: tuple[str, ...], place: Place, region: RuleHere | None) -> tuple[str, ...]:
    """Say what to do.

    Args:
        cause: Why it happened.
        op: The op, as a policy names it.
        path: The module.
        place: Where it belongs.
        region: The region it ran in.
    """
    in_float32 = _module_line(path)
    if cause.kind in ("came in", "domain"):
        # The 0 may be a small number that a lower precision has lost.
        lost = cause.kind == "domain" and region is not None and in_float32
        return (cause.cure, f"if float32 would not have it there, {in_float32}") if lost else (cause.cure,)
    if cause.kind == "unknown":
        return ()
    target = (place.backward_of or op) if place.phase == "backward" else op
    advice = []
    if place.phase == "backward":
        advice.append(
            "if the loss is scaled, a GradScaler lowers the scale by itself; a few skipped steps at the start are normal"
        )
        if cause.kind == "cast":
            advice.append(
                "make the loss smaller, or its scale: this is a gradient as it comes to an op in lower precision"
            )
    elif cause.kind == "cast" and cast_by_program(op):
        advice.append(f"leave out the cast to {cause.dtype} in this line, or scale the numbers down before it")
    if not (cause.kind == "cast" and cast_by_program(op)):
        advice.append(_rule_line(target, region))
    if in_float32:
        advice.append(in_float32)
    if cause.flows_on and place.phase == "forward":
        advice.append(
            f"the result does not fit {cause.dtype}, so what reads it next in {cause.dtype} needs the same, or smaller "
            "numbers: divide before this op, or normalize"
        )
    if cause.dtype == "float16":
        advice.append("use bfloat16, whose range is float32's: autocast(..., dtype=torch.bfloat16)")
    return tuple(advice)


def cast_by_program(op: str) -> bool:
    """Say whether an op's name is that of a cast, so that no rule of a policy made it."""
    return op in ("aten::_to_copy", "aten::copy_")


def _module_line(path: tuple[str, ...]) -> str:
    """Give the advice to keep a module in float32; nothing if its name is no module's of a model."""
    model, _, name = path[0].rpartition(").") if path else ("", "", "")
    if not name or "(" in name:
        return ""
    whose = f" of {model.removeprefix('(')}" if model else ""
    return f'keep this module{whose} in float32:\nmezzo.torch.set_precision(model, {{"{name}": "fp32"}})'


def _rule_line(op: str, region: RuleHere | None) -> str:
    name = base_name(op).removeprefix("aten::")
    if not _can_be_ruled(op):
        return f"cast what goes into {name} to float32: .float()"
    given = f'{{"{name}": "fp32"}}'
    if region is not None and region.policy not in builtin_names():
        code = f"policy = policy.override({given})  # your policy {region.policy!r}"
    else:
        known = "default" if region is None else region.policy
        code = f'policy = mezzo.builtin_policy("{known}").override({given})'
    return f"run {name} in float32:\n{code}\nmezzo.torch.autocast(..., policy=policy)"


def _can_be_ruled(op: str) -> bool:
    try:
        mezzo.builtin_policy("default").override({base_name(op): "fp32"})
    except mezzo.MezzoError:
        return False
    return True
