"""What a user of autocast may not expect: products that stay in float32 and why, and what a rewrite does not see into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mezzo.report import Finding, OpRecord

from .ops import is_known

__all__ = ["findings_of", "is_inside"]

_WIDE = ("float32", "float64")
_OPAQUE_VJP = "opaque custom_vjp"

_ADVICE = (
    ("precision=", "leave precision= away if lower precision is good enough here"),
    ("disabled()", ""),
    ("float64", "cast the float64 operand to float32 first"),
    ("while", "if the loop does not stop at a tolerance: autocast(..., while_='body')"),
    (_OPAQUE_VJP, "if its rules are safe in lower precision: autocast(..., custom_vjp={{'{name}': 'enter'}})"),
)
_REGISTER = "tell mezzo.jax.register_primitive what it is, and give it a rule in a policy"
_BY_POLICY = "the policy has it so; another: Policy.override({{'{op}': 'lower_precision_fp'}})"


def is_inside(record: OpRecord) -> bool:
    """Say whether a record is of something inside of an op that was not entered."""
    return "inside" in record.key


def findings_of(records: Sequence[OpRecord]) -> Iterator[Finding]:
    """Look through the records of a region.

    Args:
        records: Its records, in order; those of dots inside of an op that was not entered come right after it.

    Yields:
        One finding for each dot that stays in float32 or float64, for each op that was not entered and has such dots or a
        VJP of its own, and for each unknown primitive. The same may come several times.
    """
    for place, record in enumerate(records):
        if is_inside(record):
            continue
        inside = _dots_inside(records, place)
        if record.dot and _is_wide(record):
            message = f"{record.op} stays in {_dtypes(record)}: {record.reason or f'rule {record.rule}'}"
            yield _finding("float32 dot", message, record)
        elif not is_known(record.op):
            message = f"the primitive {record.op} is in no table: it keeps the dtypes that were traced"
            yield replace(_finding("unknown primitive", message + _with(inside), record), advice=_REGISTER)
        elif record.reason.startswith(_OPAQUE_VJP):
            yield _finding("opaque custom_vjp", f"{record.reason}: it keeps its dtypes{_with(inside)}", record)
        elif inside:
            why = f" ({record.reason})" if record.reason not in ("", f"{record.op} body") else ""
            yield _finding("float32 dot", f"{record.op} keeps its dtypes{why}{_with(inside)}", record)


def _finding(kind: str, message: str, record: OpRecord) -> Finding:
    return Finding(kind, message, _advice(record), record.source, record.path)


def _dots_inside(records: Sequence[OpRecord], place: int) -> list[OpRecord]:
    found = []
    for record in records[place + 1 :]:
        if not is_inside(record):
            break
        if _is_wide(record):
            found.append(record)
    return found


def _is_wide(record: OpRecord) -> bool:
    return not set(_WIDE).isdisjoint(record.used)


def _with(inside: Sequence[OpRecord]) -> str:
    if not inside:
        return ""
    number = "1 matrix product" if len(inside) == 1 else f"{len(inside)} matrix products"
    return f", with {number} in {' and '.join(sorted({_dtypes(record) for record in inside}))} inside"


def _dtypes(record: OpRecord) -> str:
    return " x ".join(dict.fromkeys(record.used))


def _advice(record: OpRecord) -> str:
    name = record.reason.removeprefix(_OPAQUE_VJP).strip()
    for start, advice in _ADVICE:
        if record.reason.startswith(start):
            return advice.format(name=name)
    return "" if record.reason or not record.dot else _BY_POLICY.format(op=record.op)
