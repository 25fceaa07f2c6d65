"""Repairs in compiled code: what PyTorch would refuse is found out while the code is traced, on small real tensors.

Code is traced on tensors without data, and PyTorch's kernels for those often take what the real kernels refuse. A call that
eager code would make again in other dtypes (`mezzo.torch.repairs`) would so be written down as it came, and fail when the
compiled code runs. So while code is traced, a call that is in doubt is first made by eager code, of real tensors of the same
dtypes and sizes; then it is traced in the way that worked there.

This is done by kernels that only PyTorch's Python dispatcher knows of, which is on while code is traced and at no other
time: eager code does not pass through here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from mezzo import tables
from mezzo.decision import CastPolicy
from mezzo.torch.active import Active, slot_for
from mezzo.torch.casting import ELIGIBLE, common_dtype
from mezzo.torch.eager import runs_eagerly
from mezzo.torch.freshness import tensors_in
from mezzo.torch.ops import NUMBERS, OpSpec, with_tensors
from mezzo.torch.plans import build_plan, device_rules
from mezzo.torch.repairs import Repair, noted_attempts

__all__ = ["Repairer", "probe_while_tracing"]

Repairer = Callable[[Sequence[Any], dict[str, Any]], "tuple[Repair, CastPolicy | None] | None"]
"""Gives what would repair a call, and the rule by which the op runs; None if nothing would."""

_MOST_ELEMENTS = 2**20
_SMALLEST = 16
_MOST_KNOWN = 1024
_CASTING = (CastPolicy.LOWER_PRECISION_FP, CastPolicy.FP32, CastPolicy.PROMOTE)
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_include_set = torch._C._dispatch_tls_local_include_set
_exclude_set = torch._C._dispatch_tls_local_exclude_set
# What tracing and transforms put in a call's way.
_TRACING_KEYS = [
    torch._C._dispatch_key_parse(name)
    for name in (
        *("Python", "PythonTLSSnapshot", "PythonDispatcher", "PreDispatch", "Functionalize"),
        *("FuncTorchDynamicLayerBackMode", "FuncTorchDynamicLayerFrontMode"),
        *("FuncTorchGradWrapper", "FuncTorchVmapMode", "FuncTorchBatched"),
    )
]
# By all that an outcome depends on, so threads may share it.
_known: dict[tuple[Any, ...], int] = {}


class _UnknownError(Exception):
    """Raised, and caught here, for a call of which no real one can be made."""


def probe_while_tracing(spec: OpSpec, key: torch._C.DispatchKey, repairer: Repairer) -> None:
    """Have calls of an op that are traced repaired as the eager ones would be.

    It is done once per op, key and process; calls may be traced in any thread.

    Args:
        spec: The op; it has a kernel of mezzo's on the key.
        key: The dispatch key.
        repairer: Says what would repair a call.
    """
    if key in spec.overload.py_kernels:  # another library's; the op is traced as PyTorch does by itself
        return
    call, places = spec.overload._op_dk, [index for index, _ in spec.tensors]

    @runs_eagerly
    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call(key, *args, **kwargs)

    @runs_eagerly
    def traced(*args: Any, **kwargs: Any) -> Any:
        if not spec.takes_numbers and any(args[place].__class__ in NUMBERS for place in places if place < len(args)):
            args = with_tensors(args, places)
        found = repairer(args, kwargs)
        if found is not None and _is_in_doubt(spec, *found, args, kwargs):
            repair = found[0]
            number = _attempt_that_works(spec, repair.device, args, kwargs)
            if number:
                return repair.attempt(number, run, args, kwargs)
        return run(args, kwargs)

    spec.overload.py_impl(key)(traced)


def _is_in_doubt(
    spec: OpSpec, repair: Repair, rule: CastPolicy | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Say whether PyTorch may refuse a call: its dtypes differ under the op's rule, or one is low and may lack a kernel."""
    floating = (tensor for tensor in tensors_in((*args, *kwargs.values())) if _is_floating(tensor))
    dtypes = {tensor.dtype for tensor in floating}
    cast = dtypes & ELIGIBLE
    if cast and rule in _CASTING and not spec.state:
        low = torch.get_autocast_dtype(repair.device)
        target = {CastPolicy.LOWER_PRECISION_FP: low, CastPolicy.FP32: torch.float32}.get(rule)
        dtypes = (dtypes - cast) | {target or common_dtype(cast, low)}
    if len(dtypes) > 1:
        return True
    return any(dtype.itemsize < torch.float32.itemsize for dtype in dtypes) and not _takes_low(spec.name, repair.device)


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _takes_low(op: str, device: str) -> bool:
    """Say whether an op is known to have kernels for the lower precisions; that was tried out on the CPU."""
    if device_rules(device, "bfloat16").get(op) is CastPolicy.LOWER_PRECISION_FP:
        return True
    return device == "cpu" and op in tables.repairs() and op not in _lacking_low()


@cache
def _lacking_low() -> frozenset[str]:
    return frozenset(row["op"] for row in tables.read("torch", "repairs") if row["lacks"])


def _attempt_that_works(spec: OpSpec, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Give the number of the attempt that eager code ends with; 0 for the call as it came, and where it is unknown."""
    try:
        described = _described((args, kwargs), {})
    except _UnknownError:
        return 0
    policy = slot_for(device).current().policy
    key = (spec.name, device, policy, torch.get_autocast_dtype(device), _exclude_set().raw_repr(), described)
    number = _known.get(key)
    if number is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        number = _known[key] = _probe(spec, device, args, kwargs)
    return number


def _described(value: Any, seen: dict[int, int]) -> Any:
    """Describe arguments as far as a probe depends on them; equal descriptions, equal outcomes."""
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided:
            raise _UnknownError
        place = seen.setdefault(id(value), len(seen))
        return place, value.dtype, value.device, tuple(_hint(size) for size in value.shape)
    if isinstance(value, list | tuple):
        return tuple(_described(item, seen) for item in value)
    if isinstance(value, dict):
        return tuple((name, _described(item, seen)) for name, item in value.items())
    value = _hint(value)
    if value is not None and not isinstance(value, _PLAIN):
        raise _UnknownError
    return type(value), value


def _hint(value: Any) -> Any:
    """Give the number that a symbolic one stands for in this trace, and make nothing depend on it."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value
    hint = value.node.hint
    if hint is None:
        raise _UnknownError
    return hint


def _probe(spec: OpSpec, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    tensors = list(tensors_in((*args, *kwargs.values())))
    divisor = _divisor([[_hint(size) for size in tensor.shape] for tensor in tensors])
    if divisor is None or not torch.get_device_module(device).is_available():
        return 0
    numbers: dict[str, int] = {}
    with _eagerly(device, {tensor.device.index for tensor in tensors if tensor.device.type == device} - {None}):
        outer, noted_attempts.numbers = noted_attempts.numbers, numbers
        try:
            # Whatever it raises over the values: what counts is which attempt it had come to.
            with suppress(Exception):
                # LAPACK counts from one, and trusts what it is given.
                counts_from = int(any("pivots" in argument.name for argument in spec.overload._schema.arguments))
                real_args, real_kwargs = _real((args, kwargs), {}, divisor, counts_from)
                spec.overload(*real_args, **real_kwargs)
        finally:
            noted_attempts.numbers = outer
    return numbers.get(spec.name, 0)


def _divisor(shapes: list[list[int]]) -> int | None:
    """Give what sizes have to be divided by for a probe to be quick; None if nothing helps."""
    for exponent in range(_MOST_ELEMENTS.bit_length()):
        divisor = 1 << exponent
        if sum(math.prod(_divided(size, divisor) for size in shape) for shape in shapes) <= _MOST_ELEMENTS:
            return divisor
    return None


def _divided(size: int, divisor: int) -> int:
    return size if size % divisor or size // divisor < _SMALLEST else size // divisor


def _real(value: Any, made: dict[int, Tensor], divisor: int, index: int) -> Any:
    """Make arguments like those that came, of real tensors; a tensor that came twice is there twice."""
    if isinstance(value, Tensor):
        if id(value) not in made:
            # Ones are in the domain of most functions.
            number = 1 if _is_floating(value) else index
            sizes = [_divided(_hint(size), divisor) for size in value.shape]
            made[id(value)] = torch.full(sizes, number, dtype=value.dtype, device=value.device)
        return made[id(value)]
    if isinstance(value, list | tuple):
        return [_real(item, made, divisor, index) for item in value]
    if isinstance(value, dict):
        return {name: _real(item, made, divisor, index) for name, item in value.items()}
    return _hint(value)


@contextmanager
def _eagerly(device: str, indices: Iterable[int]) -> Iterator[None]:
    """Have a block run as eager code would in this place, and leave no trace: nothing traced, observed or drawn."""
    slot = slot_for(device)
    with ExitStack() as stack:
        for context in (
            torch._C.DisableTorchFunction(),
            _disable_current_modes(),
            temporarily_clear_interpreter_stack(),
            torch._C._DisablePythonDispatcher(),
        ):
            stack.enter_context(context)
        included = _include_set()
        for key in _TRACING_KEYS:
            included = included.remove(key)
        stack.enter_context(torch._C._ForceDispatchKeyGuard(included, _exclude_set()))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(indices, device_type=device))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        active, observer = slot.active, slot.observer
        if observer is not None:
            policy = slot.current().policy
            slot.observe(None)
            slot.active = Active(policy, build_plan(policy, device, serve="all"))
        try:
            yield
        finally:
            if observer is not None:
                slot.active = active
                slot.observe(observer)
