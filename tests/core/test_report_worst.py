"""Which op heads a report: one whose numbers a low dtype really gets, and the forward pass before the backward pass."""

from __future__ import annotations

from typing import Any

from mezzo.report import OpRecord
from mezzo.report.low_uses import low_uses
from mezzo.report.numbers import Loss, Numbers
from mezzo.report.worst import worst

F32, F16 = "float32", "float16"


def op(name: str, came: str, gave: str, *, used: str = "", overflow: float = 0.0, **more: Any) -> OpRecord:
    numbers = Numbers(4, more.pop("largest", 1.0), 0.5, losses={F16: Loss(overflow)}, error=more.pop("error", None))
    shape = more.pop("shape", (2, 2))
    return OpRecord(
        name, "rule", came=(came,), used=(used or came,), gave=(gave,), shapes_in=(shape,), shapes_out=(shape,),
        numbers=numbers, **more,
    )  # fmt: skip


def named(*records: OpRecord) -> dict[str, tuple[str, str]]:
    return {what: (how, record.op) for what, (how, record) in worst(records).items()}


def test_what_is_never_cast_low_heads_nothing() -> None:
    scale = op("full", F32, F32, overflow=1.0, shape=(1,))
    adam = op("addcmul_", F32, F32, overflow=0.9, phase="optimizer")
    read = op("exp", F32, F32, overflow=0.1)
    dot = op("linear", F32, F16, used=F16)
    assert named(scale, read, dot, adam) == {"overflow": ("10% in float16", "exp")}
    assert named(scale, dot) == {}
    assert named(adam) == {}


def test_a_scaled_loss_is_not_taken_for_another_product() -> None:
    low = op("mul", F16, F16, path=("net",))
    loss = op("mul", F32, F32, overflow=1.0, shape=())
    assert named(low, loss) == {}
    assert named(low, op("mul", F32, F32, overflow=1.0, shape=(), path=("net",))) == {
        "overflow": ("100% in float16", "mul")
    }


def test_a_cast_that_the_program_asks_for_reads_the_result_before_it() -> None:
    made = [op("exp", F32, F32, overflow=0.2), op("aten::_to_copy", F32, F16), op("log", F32, F32, overflow=0.9)]
    assert named(*made) == {"overflow": ("20% in float16", "exp")}
    assert [sorted(one) for one in low_uses(made)] == [[F16], [F16], []]


def test_a_cast_of_a_parameter_or_of_another_pass_says_nothing_of_a_result_of_its_shape() -> None:
    weight = op("linear", F32, F16, used=F16, operands=("0.weight",))
    later = op("mm", F32, F16, used=F16, phase="backward")
    for reader in (weight, later):
        assert low_uses([op("exp", F32, F32), reader])[0] == frozenset()


def test_without_any_low_dtype_all_but_the_optimizer_may_lose() -> None:
    records = [op("exp", F32, F32, overflow=0.5), op("addcmul_", F32, F32, overflow=0.9, phase="optimizer")]
    assert named(*records) == {"overflow": ("50% in float16", "exp")}


def test_errors_of_the_forward_pass_come_first_and_larger_gradients_are_named_apart() -> None:
    sub = op("sub", F16, F16, error=2.5)
    assert named(sub, op("add", F16, F16, error=2500.0, phase="backward")) == {
        "error": ("2.5", "sub"),
        "grad error": ("2.5e+03", "add"),
    }
    assert named(sub, op("add", F16, F16, error=0.5, phase="backward")) == {"error": ("2.5", "sub")}
    assert named(op("add", F16, F16, error=0.5, phase="backward")) == {"error": ("0.5", "add")}


def test_the_error_of_a_result_that_is_next_to_nothing_is_left_out() -> None:
    others = [op("mul", F16, F16, error=0.01, largest=10.0)] * 3
    # As large in float32 as 1e-3 / 1e6, against 10.
    cancelled = op("sub", F16, F16, error=1e6, largest=1e-3)
    assert named(*others, cancelled) == {"error": ("0.01", "mul")}
    assert named(*others, op("sub", F16, F16, error=3.0, largest=1e-3)) == {"error": ("3", "sub")}
