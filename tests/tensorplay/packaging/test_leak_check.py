"""The check after each test sees what a test with TensorPlay leaves behind, and puts the state right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorplay

import mezzo.tensorplay
from mezzo import Policy
from tests.tensorplay_state import left_behind, put_back, snapshot


def test_an_open_region_is_seen_and_a_closed_one_leaves_nothing() -> None:
    before = snapshot()
    with mezzo.tensorplay.autocast("cpu", dtype=tensorplay.float16):
        found = left_behind(before)
    assert found["TensorPlay's open regions"] == 1
    assert found["TensorPlay's wrapped names"]
    assert "tensorplay._C.mm" in found["TensorPlay's names"]  # type: ignore[operator]
    # The queries tell the truth while a region is open.
    assert found["TensorPlay's cpu enabled"] is True
    assert found["TensorPlay's cpu dtype"] == "tensorplay.float16"
    assert left_behind(before) == {}


@pytest.mark.parametrize(
    ("leave", "name", "value"),
    [
        (lambda: tensorplay.set_autocast_enabled("cpu", True), "cpu enabled", True),
        (lambda: tensorplay.set_autocast_enabled("cuda", True), "cuda enabled", True),
        (lambda: tensorplay.set_autocast_dtype("cpu", tensorplay.float16), "cpu dtype", "tensorplay.float16"),
        (lambda: tensorplay.set_autocast_dtype("cuda", tensorplay.bfloat16), "cuda dtype", "tensorplay.bfloat16"),
        (lambda: tensorplay.set_autocast_cache_enabled(False), "cache flag", False),
        (lambda: mezzo.tensorplay.set_default_policy("unified"), "default policy", "unified"),
        (lambda: mezzo.tensorplay.set_default_policy(Policy("mine", framework="tensorplay")), "default policy", "mine"),
    ],
)
def test_state_that_stays_is_seen_and_put_right(leave: Callable[[], None], name: str, value: object) -> None:
    before = snapshot()
    leave()
    assert left_behind(before) == {f"TensorPlay's {name}": value}
    put_back()
    assert left_behind(before) == {}


def test_a_name_that_is_replaced_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(tensorplay.Tensor, "relu", lambda tensor: tensor)
        patch.setattr(tensorplay.amp.autocast_mode, "_fused_enter", None)
        names = ["tensorplay.Tensor.relu", "tensorplay.amp.autocast_mode._fused_enter"]
        assert left_behind(before)["TensorPlay's names"] == names
    assert left_behind(before) == {}
