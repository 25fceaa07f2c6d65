"""Where findings are: many records of the same code in several modules as one place with one name."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence

from mezzo.report.records import OpRecord
from mezzo.torch.recording.recorded import RecordedOp

__all__ = [
    "base_name",
    "by_place",
    "common_name",
    "listed",
    "name_of",
    "op_name",
    "path_of",
    "precision_line",
    "setting_for",
    "where",
]


def name_of(record: OpRecord) -> str:
    """Give the name of the module that a record is of; empty outside of modules."""
    return record.path[-1] if record.path else ""


def op_name(record: OpRecord) -> str:
    """Give an op's name as a user writes it: ``"softmax"`` for ``"aten::softmax.int"``."""
    return record.op.removeprefix("aten::").split(".")[0]


def base_name(record: OpRecord) -> str:
    """Give an op's name without the mark of one that works in place: ``"add"`` for ``"aten::add_"``."""
    return op_name(record).removesuffix("_")


def common_name(names: Iterable[str]) -> str:
    """Give one name for several modules, with ``*`` for the parts in which they differ.

    Args:
        names: Dotted names of modules.

    Returns:
        A pattern as `mezzo.torch.set_precision` takes it; the first name if they have not the same number of parts.

    Example:
        >>> common_name(["layers.0.attn", "layers.1.attn"]), common_name(["head"]), common_name([])
        ('layers.*.attn', 'head', '')
    """
    parts = [name.split(".") for name in dict.fromkeys(names)]
    if not parts:
        return ""
    if len({len(one) for one in parts}) > 1:
        return ".".join(parts[0])
    return ".".join(one[0] if len(set(one)) == 1 else "*" for one in zip(*parts, strict=True))


def by_place(ops: Iterable[RecordedOp], *more: Sequence[Hashable]) -> list[list[RecordedOp]]:
    """Put ops together that the same line called in like modules: names that differ in numbers only are alike.

    Args:
        ops: The ops.
        more: For each op what else has to be the same.

    Returns:
        The groups, in the order of their first.
    """
    groups: dict[Hashable, list[RecordedOp]] = {}
    for place, op in enumerate(ops):
        record = op.record
        key = (record.op, record.source, re.sub(r"\d+", "*", name_of(record)), *(one[place] for one in more))
        groups.setdefault(key, []).append(op)
    return list(groups.values())


def path_of(ops: Sequence[RecordedOp]) -> tuple[str, ...]:
    """Give the path of a finding about ops: the name of their modules; empty outside of modules."""
    name = common_name(name_of(op.record) for op in ops)
    return (name,) if name else ()


def where(ops: Sequence[RecordedOp]) -> str:
    """Say which module ops are in, to be put behind their name; empty outside of modules.

    Example:
        >>> from mezzo.report.records import OpRecord
        >>> where([RecordedOp(OpRecord("aten::add", "not listed", path=(f"layers.{i}",)), i) for i in (0, 1)])
        " in 'layers.*'"
    """
    name = common_name(name_of(op.record) for op in ops)
    return f" in {name!r}" if name else ""


def precision_line(ops: Sequence[RecordedOp], rule: str) -> str:
    """Write the line that sets a rule for the modules that ops are in, or for the op where their name is not known.

    Args:
        ops: Records of one op.
        rule: ``"fp32"``, for all of the module, or a cast policy for the op, such as ``"lower_precision_fp"``.

    Returns:
        A line of Python.

    Example:
        >>> from mezzo.report.records import OpRecord
        >>> softmax = RecordedOp(OpRecord("aten::softmax.int", "fp32", path=("attn",)), 0)
        >>> precision_line([softmax], "lower_precision_fp")
        "mezzo.torch.set_precision(model, {'attn': {'softmax': 'lower_precision_fp'}})"
        >>> precision_line([softmax], "fp32")
        "mezzo.torch.set_precision(model, {'attn': 'fp32'})"
    """
    name = common_name(name_of(op.record) for op in ops)
    op = op_name(ops[0].record)
    if rule == "fp32" and name and not name.startswith("("):
        return setting_for(name)
    if name and not name.startswith("("):
        return f"mezzo.torch.set_precision(model, {{{name!r}: {{{op!r}: {rule!r}}}}})"
    if rule == "fp32":
        return "with mezzo.torch.autocast(device, enabled=False): around it, on x.float()"
    return f"policy=mezzo.builtin_policy('default').override({{{op!r}: {rule!r}}})"


def setting_for(module: str) -> str:
    """Write the line that has a module run in float32.

    Example:
        >>> setting_for("head")
        "mezzo.torch.set_precision(model, {'head': 'fp32'})"
    """
    return f"mezzo.torch.set_precision(model, {{{module!r}: 'fp32'}})"


def listed(names: Iterable[str], most: int = 3) -> str:
    """Write names in a row, the first ones only if there are many.

    Example:
        >>> listed(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
        >>> listed(["a", "b"])
        'a, b'
    """
    unique = list(dict.fromkeys(names))
    more = len(unique) - most
    return ", ".join(unique[:most]) + (f" and {more} more" if more > 0 else "")
