"""Matrix products that were left in float32 inside of a model that otherwise computes them low."""

from __future__ import annotations

from collections.abc import Iterator

from mezzo.report.findings import Finding, in_bytes
from mezzo.torch.recording.recorded import RecordedOp

from .places import common_name, listed, name_of, op_name
from .recording import LOW, Recording, is_float

__all__ = ["float32_products"]

_FP32 = ("fp32", "fp32_set_opt_dtype", "fp32_append_dtype")
_SHARE = 0.01
"""Of the bytes that products of the forward pass write: what is less, as the angles of rotary embeddings, costs nothing."""


def float32_products(recording: Recording) -> Iterator[Finding]:
    """Find matrix products and convolutions in float32 where other modules compute theirs in lower precision.

    A line of a module that computes low at another time is left out: that is a run outside of the region, as for validation.

    Args:
        recording: The ops.

    Yields:
        A finding of the kind ``"float32 products"`` for each reason, module by module; the name is that of the outermost
        module that has no other products.
    """
    products = [op for op in recording.forward if op.record.dot and op.record.used and not _is_recurrent(op)]
    low = [op for op in products if any(dtype in LOW for dtype in op.record.used)]
    ran_low = {(name_of(op.record), op.record.source) for op in low}
    wide = [op for op in products if low and _is_wide(op) and (name_of(op.record), op.record.source) not in ran_low]
    total = sum(op.record.bytes_written for op in products)
    taken = {name_of(op.record) for op in low}
    groups: dict[tuple[str, str], dict[str, list[RecordedOp]]] = {}
    for op in wide:
        name = _outermost(name_of(op.record), taken)
        # Modules that are called alike are told together; so are those of one part, whatever their products are called.
        key = (_why(op), "" if not name else common_name([_starred(name)]))
        groups.setdefault(key, {}).setdefault(name, []).append(op)
    for (why, _), modules in groups.items():
        ops = [op for found in modules.values() for op in found]
        written = sum(op.record.bytes_written for op in ops)
        if written >= _SHARE * total:
            yield _finding(ops, [name for name in modules if name], why, written, total, low[0].record.used)


def _finding(
    ops: list[RecordedOp], modules: list[str], why: str, written: int, total: int, used: tuple[str, ...]
) -> Finding:
    low = next(dtype for dtype in used if dtype in LOW)
    first = ops[0].record
    where = f" in {listed(map(repr, modules))}" if modules else " outside of modules"
    names = listed(op_name(op.record) for op in ops)
    message = (
        f"{names}{where}: matrix products in float32, {why}, where others run in {low}: {in_bytes(written)} of the "
        f"{in_bytes(total)} that products of the forward pass write"
    )
    if first.rule == "autocast off":
        advice = (
            f"if float32 is not meant here, take enabled=False and .float() away, or call it in the region of {low}"
        )
    elif first.rule in _FP32:
        advice = (
            "if float32 is no longer needed here, take the rule away: .remove() of what mezzo.torch.set_precision gave, or "
            "the policy's rule"
        )
    else:
        advice = f"if {low} is precise enough, cast what comes: .to(torch.{low})"
    name = common_name(modules)
    return Finding("float32 products", message, advice, first.source, (name,) if name else (), len(ops))


def _is_recurrent(op: RecordedOp) -> bool:
    """Say whether an op is a whole recurrent net, which has kernels for some dtypes only: nobody has left it in float32."""
    return any(word in op_name(op.record) for word in ("rnn", "lstm", "gru"))


def _is_wide(op: RecordedOp) -> bool:
    floats = [dtype for dtype in op.record.used if is_float(dtype)]
    return bool(floats) and all(dtype == "float32" for dtype in floats)


def _why(op: RecordedOp) -> str:
    record = op.record
    if record.rule == "autocast off":
        return "because autocast is off there"
    if record.rule in _FP32:
        return f"as asked for by the {record.reason or 'rule ' + record.rule}"
    return "because float32 comes and no rule of the policy casts it"


def _outermost(name: str, taken: set[str]) -> str:
    """Climb from a module to the outermost one in which no product was low."""
    found, parts = name, name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        outer = ".".join(parts[:length])
        if any(other == outer or other.startswith(f"{outer}.") for other in taken):
            break
        found = outer
    return found


def _starred(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
