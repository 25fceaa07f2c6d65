"""Calls to make in many dtypes: PyTorch's op database, and each aten overload itself; for ``find_repairs.py``."""
# ruff: noqa: SLF001 - schemas live in _schema

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from recording_kernels import ERRORS, RECORDER, cast, floats, fresh, structure
from torch import Tensor
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    op_db,
)
from torch.utils._pytree import tree_flatten, tree_unflatten

from mezzo.torch.ops import find_overload
from mezzo.vocabulary import base_name, vocabulary

__all__ = [
    "DTYPES",
    "Call",
    "Mix",
    "all_calls",
    "calls_of_database",
    "calls_of_overloads",
    "calls_of_recurrent_nets",
    "calls_of_sparse_tensors",
    "run",
    "variants",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGEST = 20_000  # elements; there are always smaller samples
# Not called with arguments of others: they are private, take memory apart, wait, draw numbers or belong to other machines.
NOT_CALLED = (
    "_",
    "set_",
    "resize",
    "rename",
    "record_stream",
    "cudnn",
    "miopen",
    "mkldnn",
    "fbgemm",
    "quantize",
    "q_",
    "rand",
)


@dataclass(frozen=True)
class Call:
    """A call that can be made over and over with its tensors in other dtypes.

    Attributes:
        name: For reports.
        function: What is called.
        args: Positional arguments, float tensors in float32.
        kwargs: Keyword arguments.
        outs: Those keywords that are written into and returned.
        in_place: Whether the first argument is written into.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[str, ...] = ()
    in_place: bool = False

    def sources(self) -> tuple[Any, dict[str, Any]]:
        """Give the arguments without ``out``."""
        return self.args, {name: value for name, value in self.kwargs.items() if name not in self.outs}

    def count(self) -> int:
        """Count the float tensors that are not ``out``."""
        return len(floats(self.sources()))


Mix = tuple[tuple[torch.dtype, ...], torch.dtype | None]
"""The dtype of each float tensor that is not ``out``, and that of ``out``."""


def variants(call: Call) -> Iterator[Mix]:
    """Give the dtypes to try: all alike, one unlike the rest; each with each ``out``."""
    count = call.count()
    seen = set()
    for first in DTYPES:
        for other in DTYPES:
            for place in range(min(count, 5)):
                dtypes = tuple(first if i == place else other for i in range(count))
                for out in DTYPES if call.outs else (None,):
                    if (dtypes, out) not in seen:
                        seen.add((dtypes, out))
                        yield dtypes, out


def run(call: Call, mix: Mix, repairs: frozenset[str] = frozenset()) -> Any:
    """Make a call.

    Args:
        call: The call.
        mix: The dtypes.
        repairs: Ops to repair.

    Returns:
        The result, or the error that came. In grad mode the float tensors of a functional call ask for gradients.
    """
    dtypes, out = mix
    leaves, shape = tree_flatten(fresh(call.sources()))
    left = iter(dtypes)
    is_float = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
    leaves = [leaf.to(next(left)) if f else leaf for leaf, f in zip(leaves, is_float, strict=True)]
    if torch.is_grad_enabled():
        leaves = [leaf.requires_grad_() if f else leaf for leaf, f in zip(leaves, is_float, strict=True)]
    args, kwargs = tree_unflatten(leaves, shape)
    kwargs.update({name: cast(fresh(call.kwargs[name]), out) for name in call.outs})
    RECORDER.reset(repairs)
    try:
        return call.function(*args, **kwargs)
    except ERRORS as error:
        return error


def all_calls() -> Iterator[Call]:
    """Make the calls that people make."""
    yield from calls_of_recurrent_nets()
    yield from calls_of_sparse_tensors()
    yield from calls_of_database()


def calls_of_database() -> Iterator[Call]:
    """Make the calls of PyTorch's op database, functional, in place and with ``out``."""
    for op in op_db:
        name = f"{op.name}.{op.variant_test_name}".rstrip(".")
        for sample in _samples(op):
            args = (sample.input, *sample.args)
            yield Call(name, op.op, args, sample.kwargs)
            if op.inplace_variant:
                yield Call(f"{name} in place", op.inplace_variant, args, sample.kwargs, in_place=True)
            if op.supports_out and floats(outs := _result_of(op.op, args, sample.kwargs)):
                yield Call(f"{name} out", op.op, args, {**sample.kwargs, "out": outs}, ("out",))
    for op in (*foreach_binary_op_db, *foreach_pointwise_op_db, *foreach_other_op_db):
        for sample in _samples(op):
            args = (sample.input, *sample.args)
            for function in (op.method_variant, op.inplace_variant):
                if function:
                    in_place = function is op.inplace_variant
                    yield Call(op.name + "_" * in_place, function, args, sample.kwargs, in_place=in_place)


def _samples(op: Any) -> list[Any]:
    """Give up to six samples of an op that differ in more than their sizes, those of the most tensors."""
    torch.manual_seed(0)
    chosen: dict[str, Any] = {}
    try:
        for sample in islice(op.sample_inputs_func(op, "cpu", torch.float32, requires_grad=False), 60):
            tree = (sample.input, sample.args, sample.kwargs)
            # Who names the dtype of the result gets what that asks for.
            named = any(isinstance(leaf, torch.dtype) for leaf in tree_flatten(tree)[0])
            if floats(tree) and not named and sum(t.numel() for t in floats(tree)) < LARGEST:
                chosen.setdefault(structure(tree), sample)
    except Exception as error:  # noqa: BLE001 - it cannot be made here, for want of a library
        print(f"no more samples of {op.name}: {error}", file=sys.stderr)
    return sorted(chosen.values(), key=lambda sample: -len(floats((sample.input, sample.args, sample.kwargs))))[:6]


def calls_of_recurrent_nets() -> Iterator[Call]:
    """Make the calls that recurrent modules make, which the database does not have."""
    for name, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
        x, hidden = torch.randn(5, 2, 3), [torch.randn(1, 2, 4) for _ in range(2 if name == "lstm" else 1)]
        weights = [torch.randn(gates * 4, 3), torch.randn(gates * 4, 4), torch.randn(gates * 4), torch.randn(gates * 4)]
        state: Any = hidden if name == "lstm" else hidden[0]
        rest = (True, 1, 0.0, False, False, False)
        yield Call(name, getattr(torch, name), (x, state, weights, *rest), {})
        cell_state: Any = [h[0] for h in hidden] if name == "lstm" else hidden[0][0]
        yield Call(f"{name}_cell", getattr(torch, f"{name}_cell"), (x[0], cell_state, *weights), {})
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
        rest = (True, 1, 0.0, False, False)
        yield Call(f"{name} packed", getattr(torch, name), (packed.data, packed.batch_sizes, state, weights, *rest), {})


def calls_of_sparse_tensors() -> Iterator[Call]:
    """Make the calls of which only the kernels for sparse layouts lack a dtype, or take one alone."""
    dense, w = torch.randn(4, 4).relu() + torch.eye(4), torch.randn(4, 4)
    coo, csr = dense.to_sparse(), dense.to_sparse_csr()
    yield Call("sparse.softmax", torch.sparse.softmax, (coo, 1), {})
    yield Call("sparse.log_softmax", torch.sparse.log_softmax, (coo, 1), {})
    for name, s in (("coo", coo), ("csr", csr)):
        yield Call(f"mm {name}", torch.mm, (s, w), {})
        yield Call(f"mv {name}", torch.mv, (s, w[0]), {})
        yield Call(f"matmul {name}", torch.matmul, (s, w), {})
        yield Call(f"matmul {name} with itself", torch.matmul, (s, s), {})
        yield Call(f"matmul by {name}", torch.matmul, (w, s), {})
        yield Call(f"matmul {name} by vector", torch.matmul, (s, w[0]), {})
        yield Call(f"linear {name}", torch.nn.functional.linear, (w, s), {})
        yield Call(f"addmm {name}", torch.addmm, (w, s, w), {})
        yield Call(f"addmm {name} in place", Tensor.addmm_, (w, s, w), {}, in_place=True)
        yield Call(f"sparse.mm {name}", torch.sparse.mm, (s, w), {})
        yield Call(f"sparse.addmm {name}", torch.sparse.addmm, (w, s, w), {})
    yield Call("weight norm", torch._weight_norm, (w, w[:, :1].clone(), 0), {})
    yield Call("sparse.sampled_addmm", torch.sparse.sampled_addmm, (csr, w, w), {})
    yield Call("sparse.mm reduce", torch.sparse.mm, (csr, w, "mean"), {})


def _result_of(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function in float32; None if it raises."""
    try:
        return fresh(function(*fresh(args), **fresh(kwargs)))
    except ERRORS:
        return None


def calls_of_overloads() -> Iterator[Call]:
    """Call each public overload directly, with arguments that it, or one of its family, has been given before."""
    samples = {op: [_named(op, *given) for given in kept.values()] for op, kept in RECORDER.samples.items()}
    families: dict[str, list[str]] = {}
    for op in sorted(samples):
        families.setdefault(_family(op), []).append(op)
    for op in sorted(vocabulary("torch").traits):
        plain = base_name(op).removeprefix("aten::")
        if plain.startswith(NOT_CALLED) or "backward" in plain or find_overload(op) is None:
            continue
        for donor in sorted(families.get(_family(op), []), key=lambda donor: donor != op):
            calls = [call for given in samples[donor] if (call := _direct_call(op, given))]
            yield from calls
            if calls:
                break


def _family(op: str) -> str:
    return base_name(op).rstrip("_")


def _named(op: str, args: Any, kwargs: Any) -> dict[str, Any]:
    arguments = find_overload(op)._schema.arguments
    return {**{arguments[place].name: value for place, value in enumerate(args)}, **kwargs}


def _direct_call(op: str, given: dict[str, Any]) -> Call | None:
    """Make a call of an overload from named arguments, None if they do not fit."""
    overload = find_overload(op)
    kwargs: dict[str, Any] = {}
    outs = []
    for argument in overload._schema.arguments:
        if argument.kwarg_only and argument.alias_info is not None and argument.alias_info.is_write:
            outs.append(argument.name)
        elif argument.name in given and _fits(str(argument.type), value := _alike(argument, given[argument.name])):
            kwargs[argument.name] = value
        elif not argument.has_default_value():
            return None
    made = _results(op, kwargs, len(outs)) if outs else []
    if made is None or not floats(kwargs):
        return None
    kwargs.update(zip(outs, made, strict=True))
    return Call(op, overload, (), kwargs, tuple(outs), in_place=overload._schema.is_mutable and not outs)


def _alike(argument: Any, value: Any) -> Any:
    """Give a number where an overload takes one in the place of a tensor."""
    return 2 if str(argument.type) == "number" and isinstance(value, Tensor) else value


def _fits(kind: str, value: Any) -> bool:
    """Say whether a value is of the kind that a schema's type names."""
    if value is None or kind.startswith("Optional["):
        return kind.startswith("Optional[") and (value is None or _fits(kind[len("Optional[") : -1], value))
    if kind.startswith("List["):
        return isinstance(value, list | tuple)
    if isinstance(value, Tensor | list | tuple):
        return kind == "Tensor" and isinstance(value, Tensor)
    kinds = {
        "int": int,
        "float": int | float,
        "bool": bool,
        "number": int | float | complex,
        "str": str,
        "Tensor": Tensor,
    }
    return isinstance(value, kinds.get(kind, object))


def _results(op: str, kwargs: dict[str, Any], count: int) -> list[Tensor] | None:
    """Make tensors for ``out`` by a call of the functional op of the same family."""
    for other in vocabulary("torch").covers(base_name(op)):
        schema = find_overload(other)._schema
        if schema.is_mutable or not {*kwargs} <= {a.name for a in schema.arguments}:
            continue
        leaves, _ = tree_flatten(_result_of(find_overload(other), (), kwargs))
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(made) == count and any(tensor.is_floating_point() or tensor.is_complex() for tensor in made):
            return made
    return None
