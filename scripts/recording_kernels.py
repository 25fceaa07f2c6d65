"""Kernels that record what runs at the AutocastCPU key, and repair an op if asked; for ``find_repairs.py``.

A kernel is registered for every aten op. It keeps the stack of the ops that it is inside of, so an error can be traced to
the ops that raised it, and it can repair: call an op natively and, if that raises, call it again with its inputs in one
dtype.
"""
# ruff: noqa: SLF001 - dispatch keys live in torch._C

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from mezzo import tables
from mezzo.torch.ops import OpSpec, find_overload, op_spec
from mezzo.vocabulary import base_name, vocabulary

__all__ = ["ERRORS", "RECORDER", "Frame", "cast", "floats", "fresh", "install", "is_destination", "structure", "widest"]

ERRORS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AssertionError)
KEY = torch._C.DispatchKey.AutocastCPU
PAST_KEY = torch._C._dispatch_keyset_full_after(KEY)
JUST_KEY = torch._C.DispatchKeySet(KEY)
# Updated in place without the schema saying so.
STATE = frozenset({"running_mean", "running_var"})
# Their purpose is a dtype or memory, and casts themselves are made of them.
NOT_RECORDED = re.compile(
    r"_?(to_)?copy_?$|to$|set_|detach|alias$|type_as|_cast|resize|requires_grad|clone|_?empty|is_|size|stride"
)


@dataclass(frozen=True)
class Frame:
    """One op on the way to an error.

    Attributes:
        op: Its name.
        dtypes: The floating dtypes of its tensor arguments.
        below_autograd: Whether it was called by a kernel below autograd, where a cast has no gradient.
        strided: Whether all these tensors are strided; kernels for sparse ones are other kernels.
    """

    op: str
    dtypes: frozenset[torch.dtype]
    below_autograd: bool
    strided: bool


@dataclass
class Recorder:
    """What the kernels share.

    Attributes:
        repairs: The ops to repair. While one of them runs, those inside it are not repaired.
        stack: The ops that run now.
        trace: The ops that ran when the first error came that no repair has cured, outermost first.
        samples: For each op some arguments it has been called with, kept while ``capturing``.
    """

    repairs: frozenset[str] = frozenset()
    stack: list[Frame] = field(default_factory=list)
    trace: tuple[Frame, ...] = ()
    inside: bool = False
    capturing: bool = False
    samples: dict[str, dict[str, tuple[list[Any], dict[str, Any]]]] = field(default_factory=dict)

    def reset(self, repairs: frozenset[str]) -> None:
        """Get ready for a call."""
        self.repairs, self.trace, self.inside = repairs, (), False


RECORDER = Recorder()


def floats(tree: Any) -> list[Tensor]:
    """Give the floating-point tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def fresh(tree: Any) -> Any:
    """Copy all tensors in nested lists, tuples and dicts."""
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, tree)


def structure(tree: Any) -> str:
    """Describe arguments but for sizes and values, to tell calls of one kind."""
    return str(tree_map(lambda x: x.dim() if isinstance(x, Tensor) else type(x).__name__, tree))


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in nested lists, tuples and dicts."""
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Give the dtype to which inputs of these dtypes are promoted: never a low one, its kernel may be what is missing."""
    return torch.float64 if torch.float64 in set(dtypes) else torch.float32


@cache
def is_destination(op: str) -> bool:
    """Say whether what an op writes into is its result, or its only effect, as for in-place and ``out`` overloads."""
    schema = find_overload(op)._schema
    return (schema.is_mutable and not schema.returns) or any(
        r.alias_info is not None and r.alias_info.is_write for r in schema.returns
    )


@cache
def _writes(op: str, place: int | str) -> bool:
    arguments = find_overload(op)._schema.arguments
    argument = arguments[place] if isinstance(place, int) else next(a for a in arguments if a.name == place)
    return argument.name in STATE or (argument.alias_info is not None and argument.alias_info.is_write)


def _arguments(op: str, args: Any, kwargs: Any) -> Iterator[tuple[int | str, Any, bool]]:
    """Give place and value of each argument, and whether it is written into."""
    for place, value in (*enumerate(args), *kwargs.items()):
        yield place, value, _writes(op, place)


def _dtypes(op: str, args: Any, kwargs: Any, *, written: bool) -> frozenset[torch.dtype]:
    return frozenset(t.dtype for _, value, w in _arguments(op, args, kwargs) if w is written for t in floats(value))


Given = tuple[list[Any], dict[str, Any]]


def _with(op: str, args: Any, kwargs: Any, read: torch.dtype, written: torch.dtype | None) -> Given:
    """Cast the arguments that are read, and those that are written into if a dtype is given for them."""
    new_args, new_kwargs = list(args), dict(kwargs)
    for place, value, is_written in _arguments(op, args, kwargs):
        dtype = written if is_written else read
        if dtype is not None:
            (new_kwargs if isinstance(place, str) else new_args)[place] = cast(value, dtype)  # type: ignore[index]
    return new_args, new_kwargs


def repair(op: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call an op with its inputs in one dtype.

    In-place and ``out`` overloads get their sources in the destination's dtype. If that raises, and for all other ops, the
    inputs are cast to the widest of their dtypes, and to float32 if that is a low one; what is written into then is a copy,
    which is copied back. If that raises too, the op runs in that dtype without autocast.
    """
    written = _dtypes(op, args, kwargs, written=True)
    if is_destination(op) and len(written) == 1:
        new_args, new_kwargs = _with(op, args, kwargs, next(iter(written)), None)
        try:
            return call(*new_args, **new_kwargs)
        except ERRORS:
            pass
    wide = widest(_dtypes(op, args, kwargs, written=False) | written)
    new_args, new_kwargs = _with(op, args, kwargs, wide, wide)
    try:
        result = call(*new_args, **new_kwargs)
    except ERRORS:  # for want of a kernel for the dtype to which autocast casts
        with torch.autocast("cpu", enabled=False):
            result = find_overload(op)(*new_args, **new_kwargs)
    for place, value, is_written in _arguments(op, args, kwargs):
        if is_written:
            copies = floats((new_kwargs if isinstance(place, str) else new_args)[place])  # type: ignore[index]
            for destination, copy in zip(floats(value), copies, strict=True):
                if destination is not copy:
                    destination.resize_(copy.shape).copy_(copy)
    return result


def _run(op: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    r = RECORDER
    below = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradOther)
    given = floats((args, kwargs))
    r.stack.append(Frame(op, frozenset(t.dtype for t in given), below, _strided(given)))
    try:
        if op not in r.repairs or r.inside:
            return call(*args, **kwargs)
        r.inside = True
        try:
            return call(*args, **kwargs)
        except ERRORS:
            r.trace = ()
            return repair(op, call, args, kwargs)
        finally:
            r.inside = False
    except ERRORS:
        r.trace = r.trace or tuple(r.stack)
        raise
    finally:
        r.stack.pop()


def _strided(tensors: list[Tensor]) -> bool:
    return all(tensor.layout is torch.strided for tensor in tensors)


def _capture(op: str, args: Any, kwargs: Any) -> None:
    kept = RECORDER.samples.setdefault(op, {})
    given = floats((args, kwargs))
    if len(kept) < 2 and _strided(given) and all(tensor.dtype is torch.float32 for tensor in given):
        RECORDER.capturing = False  # making the copies calls ops too
        kept.setdefault(structure((args, kwargs)), fresh((list(args), dict(kwargs))))
        RECORDER.capturing = True


def _make_kernel(spec: OpSpec) -> Callable[..., Any]:
    places = {place for place, _ in spec.tensors} if len(spec.tensors) > 1 and not spec.takes_numbers else set()
    make_call = _native_call(spec)

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # PyTorch hands over a number in the place of a tensor, and does not take it back.
        is_number = [place in places and isinstance(value, int | float | complex) for place, value in enumerate(args)]
        new = [torch.tensor(value) if n else value for value, n in zip(args, is_number, strict=True)]
        if RECORDER.capturing:
            _capture(spec.name, new, kwargs)
        return _run(spec.name, make_call(keyset), new, kwargs)

    return kernel


def _native_call(spec: OpSpec) -> Callable[[torch._C.DispatchKeySet], Callable[..., Any]]:
    """Find how an op runs without the recording kernel, given the key set of the call."""
    overload = spec.overload
    if torch._C._dispatch_has_kernel_for_dispatch_key(spec.name, "AutocastCPU"):
        own = torch.library.get_kernel(overload, KEY)
        return lambda _: lambda *args, **kwargs: own.call_boxed(JUST_KEY, *args, **kwargs)

    def redispatch(keyset: torch._C.DispatchKeySet) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not spec.takes_numbers or all(isinstance(a, Tensor) for a in args[:2]):
                return overload.redispatch(keyset & PAST_KEY, *args, **kwargs)
            with torch._C._ExcludeDispatchKeyGuard(JUST_KEY):
                return overload(*args, **kwargs)

        return call

    return redispatch


def install() -> torch.library.Library:
    """Register the kernels.

    Returns:
        The library; they are there as long as it lives.
    """
    library = torch.library.Library("aten", "IMPL")
    listed = tables.device_table("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel of PyTorch's is overridden
        for op in sorted(vocabulary("torch").traits):
            spec = op_spec(op)
            if spec is not None and (op in listed or not NOT_RECORDED.match(_plain(op))) and _takes_tensors(spec):
                kernel = _make_kernel(spec)
                library.impl(op.removeprefix("aten::"), kernel, "AutocastCPU", with_keyset=True, allow_override=True)
    return library


def _plain(op: str) -> str:
    return base_name(op).removeprefix("aten::")


def _takes_tensors(spec: OpSpec) -> bool:
    return any("Tensor" in str(argument.type) for argument in spec.overload._schema.arguments)
