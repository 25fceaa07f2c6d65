"""PyTorch's ops: which exist, what their schemas say, and what PyTorch itself registers for autocast.

The tables in `mezzo.tables` are data read off one release. This module reads the same facts off the release that is
installed, so a test can say what changed, and gives the kernels what they need to know about a schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from mezzo import tables
from mezzo.errors import DeviceError, UnknownOpError
from mezzo.rules import Rule
from mezzo.vocabulary import base_name, vocabulary

__all__ = ["OpSpec", "TableChange", "installed_catalog", "op_spec", "registered_ops", "table_change"]

# Ops whose purpose is a dtype, a device, a copy, new memory or a test, vendors' own and private ones: a policy's default
# must not cast their inputs.
_NOT_COMPUTE = re.compile(
    r"_|to($|_)|type_as|clone|contiguous|detach|lift|.*copy$|new_|empty|full|zeros|ones|rand|normal$|bernoulli|is_|isin|isnan"
    r"|isinf|isfinite|isneginf|isposinf|isclose|allclose|equal$|sym_|(de)?quantize|q_|fake_quantize|choose_qparams|int_repr"
    r"|alias|result_type|segment|fbgemm|cudnn|miopen|mkldnn|data$|nonzero|one_hot|bincount|poisson$|cauchy|uniform|geometric"
    r"|exponential|log_normal|binomial|multinomial|rrelu_with|flatten_dense|unflatten_dense"
)

# Arguments that an op updates in place without its schema saying so. A cast would update a copy and lose the update, so
# of such an op only the first tensor is cast.
_STATE_ARGUMENTS = frozenset({"running_mean", "running_var"})


# PyTorch hands a number to a kernel in the place of a tensor (`x * 0.5` is mul.Tensor), but only calls of these ops accept
# it back there; the list is in PyTorch's argument parser.
NUMBERS = frozenset((bool, int, float, complex))
_TAKES_NUMBERS = frozenset(
    ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "copy")
)


@dataclass(frozen=True)
class OpSpec:
    """What a kernel must know about one overload.

    Attributes:
        name: Canonical name, ``"aten::sum.dim_IntList"``.
        overload: The callable `torch._ops.OpOverload`.
        tensors: Index and name of each positional tensor argument (``Tensor`` or ``Tensor?``).
        tensor_lists: The same for ``Tensor[]`` arguments. ``Tensor?[]``, the indices of ``index_put``, is not cast.
        leading_tensors: 2 if the tensors are two leading ones and at most a third behind them, else 0.
        uncast: Whether a positional argument holds tensors that are never cast: indices, running statistics.
        keyword_tensors: Names of tensor arguments that come by keyword only.
        dtype: Index of the optional dtype argument, None if there is none.
        dtype_keyword_only: Whether that argument comes by keyword only.
        positional_defaults: The defaults of the positional arguments, None where there is none.
        mutates: Whether the op writes into an argument.
        written: Indices of the positional arguments that it writes into.
        writes_lists: Whether among those are lists of tensors.
        written_keywords: Names of the arguments it writes into that come by keyword only: ``out``.
        state: Indices of the arguments that it updates without its schema saying so; they are never cast.
        takes_numbers: Whether a call of the overload accepts a Python number in the place of a tensor.
    """

    name: str
    overload: Any
    tensors: tuple[tuple[int, str], ...]
    tensor_lists: tuple[tuple[int, str], ...]
    leading_tensors: int
    uncast: bool
    keyword_tensors: tuple[str, ...]
    dtype: int | None
    dtype_keyword_only: bool
    positional_defaults: tuple[Any, ...]
    mutates: bool
    written: tuple[int, ...]
    writes_lists: bool
    written_keywords: tuple[str, ...]
    state: tuple[int, ...]
    takes_numbers: bool


@dataclass(frozen=True)
class TableChange:
    """How the installed PyTorch differs from a built-in table.

    Attributes:
        device: The device of the table.
        added: Ops that PyTorch registers and the table lacks.
        removed: Ops that the table has and PyTorch does not register.
    """

    device: str
    added: frozenset[str]
    removed: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)

    def __str__(self) -> str:
        if not self:
            return f"{self.device}: the table is what torch {torch.__version__} registers"
        lines = [f"{self.device}: torch {torch.__version__} differs from the built-in table"]
        lines += [f"  + {op} is registered and not in the table" for op in sorted(self.added)]
        lines += [f"  - {op} is in the table and not registered" for op in sorted(self.removed)]
        return "\n".join(lines)


def find_overload(name: str) -> Any | None:
    """Find an overload by canonical name.

    Args:
        name: ``"aten::mm"`` or ``"mylib::op.overload"``.

    Returns:
        The `torch._ops.OpOverload`, or None if this PyTorch has no such op.
    """
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return getattr(packet, overload or "default", None)


@cache
def op_spec(name: str) -> OpSpec | None:
    """Read the schema of an op.

    Args:
        name: A canonical name.

    Returns:
        The spec, or None if this PyTorch has no such op (a table may be of another release).
    """
    overload = find_overload(name)
    if overload is None:
        return None
    arguments = overload._schema.arguments
    positional = [argument for argument in arguments if not argument.kwarg_only]
    kinds = [_kind(argument) for argument in positional]
    if any(argument.name in _STATE_ARGUMENTS for argument in positional):
        # A batch norm takes a low input with float32 parameters and statistics, but no other mixture.
        kinds = [kind if place == 0 else "" for place, kind in enumerate(kinds)]
    dtypes = [
        i for i, argument in enumerate(arguments) if argument.name == "dtype" and str(argument.type) == "Optional[int]"
    ]
    dtype = dtypes[0] if dtypes else None
    return OpSpec(
        name=name,
        overload=overload,
        tensors=tuple((i, positional[i].name) for i, kind in enumerate(kinds) if kind == "tensor"),
        tensor_lists=tuple((i, positional[i].name) for i, kind in enumerate(kinds) if kind == "list"),
        leading_tensors=_leading(kinds) if not any(a.kwarg_only and _kind(a) for a in arguments) else 0,
        uncast=any(not kind and "Tensor" in str(a.type) for kind, a in zip(kinds, positional, strict=True)),
        keyword_tensors=tuple(a.name for a in arguments if a.kwarg_only and _kind(a) == "tensor"),
        dtype=dtype,
        dtype_keyword_only=dtype is not None and arguments[dtype].kwarg_only,
        positional_defaults=tuple(a.default_value if a.has_default_value() else None for a in positional),
        mutates=overload._schema.is_mutable,
        written=tuple(i for i, argument in enumerate(positional) if _is_written(argument)),
        writes_lists=any(_is_written(a) and "List" in str(a.type) for a in positional),
        written_keywords=tuple(a.name for a in arguments if a.kwarg_only and _is_written(a)),
        state=tuple(i for i, argument in enumerate(positional) if argument.name in _STATE_ARGUMENTS),
        takes_numbers=base_name(name).removeprefix("aten::") in _TAKES_NUMBERS,
    )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _leading(kinds: list[str]) -> int:
    return 2 if kinds[:2] == ["tensor", "tensor"] and not any(kinds[3:]) and kinds[2:3] != ["list"] else 0


def _kind(argument: Any) -> str:
    """Classify an argument as ``"tensor"``, ``"list"`` (of tensors) or ``""``."""
    return {"Tensor": "tensor", "Optional[Tensor]": "tensor", "List[Tensor]": "list"}.get(str(argument.type), "")


def with_tensors(args: tuple[Any, ...], places: Iterable[int]) -> tuple[Any, ...]:
    """Put tensors where a kernel was handed the numbers that they stood for.

    Args:
        args: Positional arguments.
        places: Where tensors belong.

    Returns:
        The arguments, changed where a number stands in such a place.
    """
    new = list(args)
    for place in places:
        if place < len(new) and new[place].__class__ in NUMBERS:
            new[place] = torch.tensor(new[place])
    return tuple(new)


def expand_custom_op(name: str) -> tuple[str, ...]:
    """Turn the name of a custom op into its overloads, as a base name does for aten ops.

    Args:
        name: ``"mylib::op"`` or ``"mylib::op.overload"``.

    Returns:
        Canonical names.

    Raises:
        UnknownOpError: No such op is registered in this process.
    """
    if find_overload(name) is not None:
        return (name,)
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        msg = f"{name!r} is no op: nothing of that name is registered. Import the module that defines it first."
        raise UnknownOpError(msg)
    return tuple(f"{name}.{overload}" for overload in packet.overloads() if "out" not in overload)


def expand_rules(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Give the rules of a policy by single ops: those of custom ops are written by base names, too.

    Args:
        rules: `mezzo.Policy.ops`, in which a base name comes before its overloads; so a rule for one of these wins.

    Returns:
        Canonical name to rule.

    Raises:
        UnknownOpError: A custom op is not registered in this process.
    """
    expanded: dict[str, Rule] = {}
    for op, rule in rules.items():
        expanded.update(dict.fromkeys((op,) if op.startswith("aten::") else expand_custom_op(op), rule))
    return expanded


def registered_ops(device: str) -> frozenset[str]:
    """Read off PyTorch which ops have an autocast kernel for a device.

    Args:
        device: A device type with an autocast dispatch key.

    Returns:
        Canonical names, mezzo's own registrations included.
    """
    names = torch._C._dispatch_get_registrations_for_dispatch_key(autocast_key_name(device))
    return frozenset(names)


def table_change(device: str) -> TableChange:
    """Compare a built-in table with what the installed PyTorch registers.

    Call it before mezzo registers kernels of its own: those are listed too.

    Args:
        device: A device that has a table and an autocast key.

    Returns:
        The difference, falsy when there is none; printing it says what changed.
    """
    known = frozenset(tables.device_table(device)) | tables.own_kernels(device)
    found = registered_ops(device)
    return TableChange(device, added=found - known, removed=known - found)


def autocast_key_name(device: str) -> str:
    """Name the autocast dispatch key of a device type.

    Args:
        device: A device type; the renamed PrivateUse1 backend counts as ``"privateuseone"``.

    Returns:
        The key, such as ``"AutocastCUDA"``.
    """
    spelled = {"privateuseone": "PrivateUse1", torch._C._get_privateuse1_backend_name(): "PrivateUse1"}
    return f"Autocast{spelled.get(device, device.upper())}"


def check_device(device_type: str) -> str:
    """Refuse a device type that autocast does not know.

    Args:
        device_type: A device type, or a device such as ``"cuda:0"``.

    Returns:
        The plain device type.

    Raises:
        RuntimeError: The string is no device type; PyTorch's own error.
        DeviceError: There is no autocast for it.
    """
    if not torch.amp.is_autocast_available(device_type):
        msg = f"there is no autocast for device type {device_type!r}."
        raise DeviceError(msg)
    return device_type.split(":", 1)[0]


def installed_catalog() -> dict[str, frozenset[str]]:
    """List every aten op of the installed PyTorch with its traits, as ``tables/torch/ops.csv`` holds them.

    Returns:
        Canonical name to traits; see `mezzo.vocabulary.Vocabulary`.
    """
    registered = set(torch._C._dispatch_get_all_op_names())
    catalog = {}
    for schema in torch._C._jit_get_all_schemas():
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        if name in registered and name.startswith("aten::"):
            catalog[name] = frozenset(_traits(schema))
    return catalog


def _traits(schema: Any) -> list[str]:
    traits = []
    aliased = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
    if any(a.kwarg_only and _is_written(a) for a in schema.arguments):
        traits.append("out")
    elif schema.is_mutable:
        traits.append("mutates")
    if any(a.name == "dtype" and str(a.type) == "Optional[int]" for a in schema.arguments):
        traits.append("dtype")
    base = schema.name.removeprefix("aten::")
    takes = any(_kind(a) for a in schema.arguments)
    gives = bool(schema.returns) and all("Tensor" in str(a.type) for a in schema.returns)
    if takes and gives and not aliased and "backward" not in base and not _NOT_COMPUTE.match(base):
        traits.append("compute")
    return traits


def learn_installed_ops() -> None:
    """Teach the vocabulary the ops of this PyTorch that are newer than the data."""
    vocabulary("torch").learn(installed_catalog())
