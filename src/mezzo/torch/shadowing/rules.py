"""Which ops a float32 run beside the real one may run again, and with which arguments."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

__all__ = ["Facts", "Kind", "facts_of", "is_low", "lifted_scalar", "named_arguments", "tensors_in"]

_LOW_TO_WIDE = {torch.complex32: torch.complex64} | dict.fromkeys(
    (
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ),
    torch.float32,
)

_NUMBERLESS = ("empty", "new_empty", "resize", "_resize", "set_", "_cudnn_rnn_flatten_weight")
"""Starts of the names of ops whose results hold no numbers yet, or that change where a tensor's numbers are."""

_DECISIONS = {
    "_amp_update_scale_": ("self", "growth_tracker"),
    "_amp_foreach_non_finite_check_and_unscale_": ("found_inf",),
}
"""What a scaler decides by: there is one scale and one decision to skip, those of the real run."""

_STATISTICS = frozenset({"running_mean", "running_var"})
"""Arguments that norms of batches write, though not every op's schema says so."""


class Kind(Enum):
    """What is done about an op.

    Attributes:
        PASSED: Nothing: it only makes views, or gives no numbers.
        FOLLOWED: It is run again in float32.
        RANDOM: Its result is taken: run again it would draw other numbers.
        MASKED: ``native_dropout``: its mask is taken, and put on the shadow of its input.
        FOREIGN: It is not PyTorch's own; what it writes is taken.
        COLLECTIVE: It communicates, and may write to its arguments later.
    """

    PASSED = "passed"
    FOLLOWED = "followed"
    RANDOM = "random"
    MASKED = "masked"
    FOREIGN = "foreign"
    COLLECTIVE = "collective"


@dataclass(frozen=True)
class Facts:
    """What an op's schema and name tell.

    Attributes:
        kind: What is done about it. A `Kind.RANDOM` op without chance in it is followed: see ``chance``.
        names: Its arguments' names, in order.
        written: The names of those that it writes to.
        decided: The names of those whose real numbers are used and kept, though it writes them.
        chance: The place of the argument that is the probability of a random op, and its name.
    """

    kind: Kind
    names: tuple[str, ...]
    written: frozenset[str]
    decided: frozenset[str]
    chance: tuple[int, str] | None

    def kind_with(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Kind:
        """Say what is done about a call: attention is random by its name, and not if nothing is dropped."""
        if self.kind is not Kind.RANDOM or self.chance is None:
            return self.kind
        place, name = self.chance
        chance = args[place] if place < len(args) else kwargs.get(name, 0.0)
        return Kind.FOLLOWED if chance == 0 else Kind.RANDOM


@functools.cache
def facts_of(func: OpOverload) -> Facts:
    """Look an op up.

    Example:
        >>> facts_of(torch.ops.aten.mul_.Tensor).written
        frozenset({'self'})
        >>> facts_of(torch.ops.aten.bernoulli_.float).kind, facts_of(torch.ops.aten.t.default).kind
        (<Kind.RANDOM: 'random'>, <Kind.PASSED: 'passed'>)
    """
    arguments = func._schema.arguments
    names = tuple(argument.name for argument in arguments)
    written = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
    chances = [(place, name) for place, name in enumerate(names) if name in ("dropout_p", "dropout")]
    return Facts(
        _kind(func, writes=bool(written)),
        names,
        frozenset(written) | (_STATISTICS & set(names)),
        frozenset(_DECISIONS.get(_base(func), ())),
        chances[0] if chances else None,
    )


def _base(func: OpOverload) -> str:
    return func._schema.name.partition("::")[2]


def _kind(func: OpOverload, *, writes: bool) -> Kind:
    if func.namespace not in ("aten", "prims"):
        return Kind.COLLECTIVE if "c10d" in func.namespace else Kind.FOREIGN
    if _base(func) == "native_dropout":
        return Kind.MASKED
    if torch.Tag.nondeterministic_seeded in func.tags:
        return Kind.RANDOM
    gives = any("Tensor" in str(result.type) for result in func._schema.returns)
    if not (gives or writes) or torch.Tag.inplace_view in func.tags or _base(func).startswith(_NUMBERLESS):
        return Kind.PASSED
    # In inference mode ops that are made of others come as a whole; `to` gives a view by its schema, and casts.
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return Kind.PASSED if func.is_view and not composite else Kind.FOLLOWED


def named_arguments(
    facts: Facts, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str | None, str, Any]]:
    """Go through the arguments of a call.

    Yields:
        The keyword, None for a positional argument; the name; the value.
    """
    for name, value in zip(facts.names, args, strict=False):
        yield None, name, value
    for name, value in kwargs.items():
        yield name, name, value


def lifted_scalar(name: str, value: Any) -> Any:
    """Say what an argument that is no tensor is for the float32 run.

    Example:
        >>> lifted_scalar("dtype", torch.float16), lifted_scalar("half_to_float", True), lifted_scalar("dim", 1)
        (torch.float32, False, 1)
    """
    if isinstance(value, torch.dtype):
        return _LOW_TO_WIDE.get(value, value)
    return False if name == "half_to_float" else value  # the softmax of CUDA that takes float16 and gives float32


def is_low(dtype: torch.dtype) -> bool:
    """Say whether a dtype has fewer digits than float32."""
    return dtype in _LOW_TO_WIDE


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Find the tensors in what an op takes or gives."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)
