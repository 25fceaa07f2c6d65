"""Findings of what goes wrong without NaN or Inf: gradients that become 0, and float32 out of an op without a rule."""

from __future__ import annotations

import pytest

from mezzo.report.numbers import Loss, Numbers
from mezzo.torch.recording.recorded import RecordedOp

from .made import kinds, only, op


def gradient(
    share: float, low: str = "float16", *, phase: str = "backward", callers: tuple[str, ...] = ()
) -> list[RecordedOp]:
    """Make a gradient in float32 of which a share is lost, and the cast that loses it."""
    numbers = Numbers(512, 2e-8, 5e-13, losses={low: Loss(underflow=share)})
    return [
        op("mul", 0, came="float32", gave="float32", rule="not listed", callers=callers),
        op(
            "mse_loss_backward",
            1,
            came="float32",
            gave="float32",
            rule="backward",
            phase=phase,
            numbers=numbers,
            path="drawing",
        ),
        op("_to_copy", 2, came="float32", gave=low, rule="cast", phase=phase, producers=(1,), path="drawing"),
    ]


def test_gradients_that_a_cast_makes_zero_are_found() -> None:
    one = only("gradients underflow", *gradient(0.8))
    assert one.path == ("drawing",)
    assert "80% of the gradients that come to float16 in 'drawing', from 5e-13 to 2e-08, become 0" in one.message
    assert "scaler.scale(loss).backward()" in one.advice


def test_where_the_loss_is_scaled_a_larger_scale_is_advised() -> None:
    one = only("gradients underflow", *gradient(0.8, callers=("scale",)))
    assert one.advice.startswith("a larger scale: GradScaler(init_scale=...)")


@pytest.mark.parametrize(
    "ops",
    [gradient(0.04), gradient(0.8, phase="forward"), [gradient(0.8)[2]]],
    ids=["a few are lost in any training", "no gradient", "no numbers"],
)
def test_no_underflow_is_found_where(ops: list[RecordedOp]) -> None:
    assert "gradients underflow" not in kinds(*ops)


def custom(
    came: str = "bfloat16", gave: str = "float32", *, rule: str = "not listed", phase: str = "forward"
) -> RecordedOp:
    return op("custom", 0, came=came, gave=gave, rule=rule, phase=phase, path="act", autocast="bfloat16")


def reader(name: str = "relu", rule: str = "not listed", gave: str = "float32") -> RecordedOp:
    return op(name, 1, came="float32", gave=gave, rule=rule, producers=(0,), path="act", autocast="bfloat16")


def test_an_op_without_a_rule_that_widens_is_found_and_so_is_what_takes_its_result() -> None:
    one = only("float32 memory", custom(), reader())
    assert one.path == ("act",)
    assert (
        "custom in 'act' takes bfloat16 and gives float32, and has no rule in the policy: 2.0 KiB of the 4.0 KiB"
        in one.message
    )
    assert one.message.endswith("; relu take it")
    assert one.advice == "round its result where it is made: .to(torch.bfloat16)"


@pytest.mark.parametrize(
    "ops",
    [
        [custom(gave="bfloat16"), reader()],
        [custom("bfloat16 float32"), reader()],
        [custom(), reader("_to_copy", "cast", "bfloat16")],
        [custom(phase="backward"), reader()],
        [custom(rule="cast"), reader()],
    ],
    ids=["it stays low", "float32 came too", "rounded at once", "backward", "a cast that was asked for"],
)
def test_nothing_is_found_where(ops: list[RecordedOp]) -> None:
    assert "float32 memory" not in kinds(*ops)
