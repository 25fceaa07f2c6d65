"""What can be said of a kernel from its schema, before it runs: does it compute, cast, only make a view, write in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["OpFacts", "changes_dtype", "facts_of", "is_dot", "is_float", "is_pending", "tensors_of", "written_by"]

# Names of what gives a tensor without having computed anything.
_NOTHING_DONE = """
    _local_scalar_dense _reshape_alias _unsafe_view alias detach detach_ empty empty_like empty_permuted empty_strided
    equal is_pinned is_same_size item lift lift_fresh lift_fresh_copy new_empty new_empty_strided pin_memory record_stream
    resize_ resize_as_ set_ sym_numel sym_size sym_storage_offset sym_stride unsafe_chunk unsafe_split
    unsafe_split_with_sizes
"""
_MEMORY_ONLY = "empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ resize_as_"
_CASTS = frozenset({"aten::_to_copy", "aten::to", "prims::convert_element_type"})
_PRODUCTS = """
    mm addmm bmm baddbmm addmv mv dot vdot linear matmul einsum addbmm addr chain_matmul _addmm_activation _grouped_mm
    convolution _convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc
    convolution_backward _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention scaled_dot_product_attention
    _scaled_dot_product_attention_math mkldnn_linear mkldnn_convolution _native_multi_head_attention
    _transformer_encoder_layer_fwd _scaled_dot_product_flash_attention_for_cpu_backward
    mkldnn_rnn_layer mkldnn_rnn_layer_backward _cudnn_rnn _cudnn_rnn_backward miopen_rnn _flash_attention_forward
    _flash_attention_backward _efficient_attention_forward _efficient_attention_backward
    _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward
"""
_NO_RECORD, _UNWRITTEN, _DOTS = (frozenset(names.split()) for names in (_NOTHING_DONE, _MEMORY_ONLY, _PRODUCTS))


class OpFacts(NamedTuple):
    """What is known of a kernel.

    Attributes:
        name: Its name without the overload, ``"aten::addmm"``.
        is_recorded: Whether it does something that a record tells of.
        is_cast: Whether it makes a copy of one tensor in another dtype.
        writes: Whether it writes into an argument.
        written: The places of the positional arguments that it writes into.
        gives_memory: Whether what it gives has not been written yet.
        is_random: Whether it draws random numbers.
        is_dot: Whether it is a matrix product or convolution.
        is_pending: Whether its result may be written later: a collective that is waited for by another op.
    """

    name: str
    is_recorded: bool
    is_cast: bool
    writes: bool
    written: tuple[int, ...]
    gives_memory: bool
    is_random: bool
    is_dot: bool
    is_pending: bool = False


@lru_cache(maxsize=4096)
def facts_of(func: Any) -> OpFacts:
    """Give what is known of a kernel.

    Args:
        func: An overload, or a higher-order op.
    """
    schema = getattr(func, "_schema", None)
    if schema is None:
        return OpFacts(f"higher_order::{func.name()}", True, False, False, (), False, False, False)
    name = schema.name
    base = name.partition("::")[2]
    is_view = bool(getattr(func, "is_view", False)) or not any("Tensor" in str(one.type) for one in schema.returns)
    computes = schema.is_mutable or not is_view
    return OpFacts(
        name,
        computes and base not in _NO_RECORD and not name.startswith("prim::"),
        name in _CASTS,
        schema.is_mutable,
        tuple(place for place, one in enumerate(schema.arguments) if one.is_write and not one.kwarg_only),
        base in _UNWRITTEN,
        torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()),
        base in _DOTS,
        is_pending(name),
    )


def is_pending(name: str) -> bool:
    """Say whether an op of this name is a collective whose result is there only once another op has waited for it."""
    return name.startswith("_c10d_functional") and not name.endswith("::wait_tensor")


def is_dot(name: str) -> bool:
    """Say whether an op of this name is a matrix product or convolution."""
    return name.partition("::")[2].partition(".")[0] in _DOTS


def written_by(facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Give the tensors that a call has written into.

    Args:
        facts: What is known of the kernel.
        args: Its arguments.
        kwargs: The same by name: ``out``.
    """
    if not facts.writes:
        return []
    outs = [value for name, value in kwargs.items() if name.startswith("out")]
    return tensors_of([*(args[place] for place in facts.written if place < len(args)), *outs])


def changes_dtype(facts: OpFacts, args: Sequence[Any], results: list[Tensor]) -> bool:
    """Say whether a call has made floats of one dtype from floats of another, and done nothing else.

    Args:
        facts: What is known of the kernel.
        args: Its arguments.
        results: Its results.
    """
    if facts.name == "aten::copy_":
        pair: Sequence[Tensor] = args[:2]
    elif facts.is_cast and results:
        pair = (args[0], results[0])
    else:
        return False
    return len({tensor.dtype for tensor in pair}) == 2 and all(is_float(tensor.dtype) for tensor in pair)


def tensors_of(values: Any) -> list[Tensor]:
    """Give the tensors among values, and in lists and tuples among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def is_float(dtype: torch.dtype) -> bool:
    """Say whether a dtype is a floating-point or complex one."""
    return dtype.is_floating_point or dtype.is_complex
