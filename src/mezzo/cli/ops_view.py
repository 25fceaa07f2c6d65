"""How ``mezzo ops`` shows the tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from mezzo import tables
from mezzo.decision import CastPolicy
from mezzo.errors import DeviceError
from mezzo.explanation import OpExplanation
from mezzo.policy import Policy
from mezzo.rules import ByDtype, Rule

__all__ = ["explanation_text", "ops_table", "served_by"]

_STYLES = {
    CastPolicy.LOWER_PRECISION_FP: "green",
    CastPolicy.FP32: "cyan",
    CastPolicy.FP32_SET_OPT_DTYPE: "cyan",
    CastPolicy.FP32_APPEND_DTYPE: "cyan",
    CastPolicy.PROMOTE: "yellow",
    CastPolicy.BANNED: "red",
}


def ops_table(policy: Policy, devices: Sequence[str]) -> Table:
    """Lay out a policy's rules: one row per op, one column per device.

    Args:
        policy: The policy.
        devices: Names from `mezzo.tables.devices`.

    Returns:
        A rich table.

    Raises:
        DeviceError: A device has no table.
    """
    per_device = {device: policy.on(device).ops for device in devices}
    columns = {device: rules for device, rules in per_device.items() if rules}
    names = sorted({op for rules in columns.values() for op in rules})
    same_everywhere = policy.default != "device"
    table = Table(title=f"{policy.name}: {len(names)} ops", caption=_caption(policy), header_style="bold")
    table.add_column("op", no_wrap=True)
    if same_everywhere:
        columns = {"every device": policy.ops}
    for device in columns:
        table.add_column(device)
    for op in names:
        table.add_row(op.removeprefix("aten::"), *(_cell(rules.get(op)) for rules in columns.values()))
    return table


def _cell(rule: Rule | None) -> Text:
    if rule is None:
        return Text("-", style="dim")
    return Text(str(rule), style="" if isinstance(rule, ByDtype) else _STYLES.get(rule, ""))


def _caption(policy: Policy) -> str:
    if policy.default == "device":
        return "Ops that are not listed run in the dtypes that come in. `mezzo ops NAME` explains one."
    return f"Other ops: {policy.default}. `mezzo ops NAME` explains one."


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
        lines = [line for entry in explanation.ops for line in _lines(entry, policy, device)]
        if explanation.inside:
            lines += ["and inside it"]
            lines += [line for entry in explanation.inside for line in _lines(entry, policy, device)]
        blocks.setdefault("\n".join(lines), []).append(device)
    heading = f"{op} under the policy {policy.name!r}"
    return "\n\n".join([heading, *(f"on {', '.join(names)}\n{text}" for text, names in blocks.items())])


def _lines(entry: OpExplanation, policy: Policy, device: str) -> list[str]:
    lines = entry.lines()
    # The origin of a device's own rule names the device; left out, devices that agree share one block.
    lines[1] = lines[1].replace(f"'{policy.framework}/{device}'", "of the device")
    return [*lines, f"  cast by {served_by(policy, entry.op, device)}"]


def served_by(policy: Policy, op: str, device: str) -> str:
    """Say whose kernel casts an op.

    Args:
        policy: The policy.
        op: Canonical name.
        device: A name from `mezzo.tables.devices`.

    Returns:
        Text such as ``"mezzo's kernel: the rule differs from the device's own"``.
    """
    try:
        own: CastPolicy | None = tables.device_table(device, policy.framework).get(op)
    except DeviceError:
        own = None
    rule = policy.on(device).ops.get(op)
    if rule is None and own is None:
        return "PyTorch's kernel" if op in tables.own_kernels(device, policy.framework) else "nobody"
    if rule == own:
        return "PyTorch's kernel"
    return f"mezzo's kernel, since the device's own rule is {own or 'none'}"
