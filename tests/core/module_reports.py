"""A report such as PyTorch's ops give, made by hand: a model of alike layers, forward and backward, with its findings."""

from __future__ import annotations

from typing import Any

from mezzo.report import Finding, OpRecord, Region, Report, SourceLine
from mezzo.report.numbers import Loss, Numbers

LOW, FULL = "bfloat16", "float32"
TOKENS, WIDE = (8, 16), (16, 16)


def op(
    name: str,
    rule: str,
    path: str,
    line: int,
    dtypes: tuple[tuple[str, str], ...],
    gave: str = LOW,
    **more: Any,
) -> OpRecord:
    shapes = tuple(TOKENS if place == 0 else WIDE for place in range(len(dtypes)))
    return OpRecord(
        f"aten::{name}",
        rule,
        path=(path,) if path else (),
        source=SourceLine("/home/me/nets/model.py", line, "forward"),
        came=tuple(came for came, _ in dtypes),
        used=tuple(used for _, used in dtypes),
        gave=(gave,),
        shapes_in=shapes,
        shapes_out=(TOKENS,),
        **more,
    )


def layer(number: int, numbers: Numbers | None = None) -> list[OpRecord]:
    at = f"layers.{number}"
    weight = f"{at}.attn.qkv.weight"
    because = "rule of aten::linear in the policy 'default' on cpu"
    return [
        op("layer_norm", "fp32", f"{at}.norm", 11, ((LOW, FULL), (FULL, FULL)), FULL, numbers=numbers),
        op("linear", "lower_precision_fp", f"{at}.attn.qkv", 12, ((FULL, LOW), (FULL, LOW)), dot=True, reason=because,
           operands=("", weight), numbers=numbers),
        op("mul", "not listed", f"{at}.attn", 13, ((LOW, LOW),), numbers=numbers),
        op("relu", "not listed", f"{at}.attn", 13, ((LOW, LOW),), numbers=numbers),
        op("softmax", "fp32", f"{at}.attn", 14, ((LOW, FULL),), FULL, numbers=numbers),
    ]  # fmt: skip


def backward(number: int, numbers: Numbers | None = None) -> list[OpRecord]:
    at = f"layers.{number}.attn"
    more: dict[str, Any] = {"phase": "backward", "numbers": numbers}
    return [
        op("_softmax_backward_data", "not listed", at, 14, ((FULL, FULL),), FULL, **more),
        op("mm", "not listed", f"{at}.qkv", 12, ((LOW, LOW), (LOW, LOW)), dot=True, reason="inside backward", **more),
    ]


def module_report(layers: int = 3, numbers: Numbers | None = None, gradients: Numbers | None = None) -> Report:
    records = [one for number in range(layers) for one in layer(number, numbers)]
    records.append(op("mean", "not listed", "", 20, ((FULL, FULL),), FULL))
    records += [one for number in reversed(range(layers)) for one in backward(number, gradients)]
    finding = Finding(
        "float32 memory",
        "softmax [runs] in float32",
        "set_precision(model, {'layers.*.attn': 'bf16'})",
        SourceLine("/home/me/nets/model.py", 14, "forward"),
        ("layers.0.attn",),
    )
    settings = {"dtype": LOW, "policy": "default", "device": "cpu"}
    return Report("Net", "torch", (Region("Net", settings, tuple(records), (finding,)),), ("a [note]",))


def large() -> Numbers:
    return Numbers(
        128, 70000.0, 1e-9, losses={"float16": Loss(0.25, 0.125, 0.0)}, exponents={16: 32, -30: 96}, error=0.02
    )
