"""How ``mezzo ops`` shows the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from mezzo.decision import CastPolicy
from mezzo.policy import Policy
from mezzo.rules import ByDtype, Rule

__all__ = ["SHORT", "explanation_text", "ops_table"]

# A table of several devices has to fit a terminal of 80 columns.
SHORT: dict[str, str] = {
    CastPolicy.LOWER_PRECISION_FP: "lower",
    CastPolicy.FP32: "fp32",
    CastPolicy.FP32_SET_OPT_DTYPE: "set",
    CastPolicy.FP32_APPEND_DTYPE: "append",
    CastPolicy.PROMOTE: "promote",
    CastPolicy.BANNED: "banned",
    CastPolicy.BANNED_LOWER_PRECISION: "no low",
    CastPolicy.FALLTHROUGH: "as is",
    CastPolicy.OPAQUE: "opaque",
}

_STYLES = {
    CastPolicy.LOWER_PRECISION_FP: "green",
    CastPolicy.FP32: "cyan",
    CastPolicy.FP32_SET_OPT_DTYPE: "cyan",
    CastPolicy.FP32_APPEND_DTYPE: "cyan",
    CastPolicy.PROMOTE: "yellow",
    CastPolicy.BANNED: "red",
    CastPolicy.BANNED_LOWER_PRECISION: "red",
}


def ops_table(policy: Policy, devices: Sequence[str]) -> Table:
    """Lay out a policy's rules: one row per op, one column per list; devices that have the same list share it.

    Args:
        policy: The policy.
        devices: Names from `mezzo.tables.devices`.

    Returns:
        A rich table.

    Raises:
        DeviceError: A device has no table.
    """
    columns: dict[str, Mapping[str, Rule]] = {}
    for device in devices:
        rules = policy.on(device).ops
        twin = next((name for name, known in columns.items() if known == rules), None)
        if twin is not None:
            columns.pop(twin)
        columns[device if twin is None else f"{twin}, {device}"] = rules
    if policy.default != "device":
        columns = {"every device": policy.ops}
    names = sorted({op for rules in columns.values() for op in rules})
    short = len(columns) > 1
    table = Table(title=f"{policy.name}: {len(names)} ops", caption=_caption(policy, short=short), header_style="bold")
    table.add_column("op", overflow="fold")
    for device in columns:
        table.add_column(device)
    for op in names:
        table.add_row(op.removeprefix("aten::"), *(_cell(rules.get(op), short=short) for rules in columns.values()))
    return table


def _cell(rule: Rule | None, *, short: bool) -> Text:
    if rule is None:
        return Text("-", style="dim")
    if isinstance(rule, ByDtype):
        return Text(f"{SHORT[rule.bfloat16]} / {SHORT[rule.float16]}" if short else str(rule))
    return Text(SHORT[rule] if short else str(rule), style=_STYLES.get(rule, ""))


def _caption(policy: Policy, *, short: bool) -> str:
    rest = "run in the dtypes that come in" if policy.default == "device" else str(policy.default)
    torch = policy.framework == "torch"
    words = f"lower: lower_precision_fp{'; set: fp32_set_opt_dtype; append: fp32_append_dtype' if torch else ''}. "
    option = "" if torch else f" --framework {policy.framework}"
    return f"{words if short else ''}Other ops: {rest}. `mezzo ops NAME{option}` explains one."


def explanation_text(policy: Policy, op: str, devices: Sequence[str]) -> str:
    """Explain one op, on each device where that makes a difference.

    Args:
        policy: The policy.
        op: An op's name in any spelling.
        devices: Names from `mezzo.tables.devices`.

    Returns:
        Text.

    Raises:
        UnknownOpError: The name is no op.
        DeviceError: A device has no table.
    """
    blocks: dict[str, list[str]] = {}
    for device in devices:
        explanation = policy.explain(op, device=device)
        # The origin of a device's own rule names the device; left out, devices that agree share one block.
        text = "\n".join(str(explanation).splitlines()[1:])
        blocks.setdefault(text.replace(f"'{policy.framework}/{device}'", "of the device"), []).append(device)
    heading = f"{op} under the policy {policy.name!r}"
    if policy.framework == "jax":
        return "\n\n".join([heading, *blocks])
    return "\n\n".join([heading, *(f"on {', '.join(names)}\n{text}" for text, names in blocks.items())])
