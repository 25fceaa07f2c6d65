"""Fused steps in blocks give what PyTorch's fused optimizers give, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mezzo.torch.masters.blocked_pass import BLOCK

from .single_pass_pairs import ADAMW, BF16, SGD, SIZES, VARIANTS, Pair, making

variants = pytest.mark.parametrize(("kind", "options"), VARIANTS.values(), ids=VARIANTS)


@variants
def test_in_blocks_twenty_steps_are_those_of_the_fused_optimizer(kind: Any, options: dict[str, Any]) -> None:
    pair = Pair(making(kind, **options), SIZES)
    for _ in range(20):
        pair.step()
    pair.assert_same()


@pytest.mark.parametrize("low", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("gradient", [BF16, torch.float16, torch.float32], ids=str)
def test_gradients_and_parameters_may_have_any_low_dtype(low: torch.dtype, gradient: torch.dtype) -> None:
    pair = Pair(making(ADAMW), SIZES, low, gradient)
    for _ in range(3):
        pair.step()
    pair.assert_same()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pair = Pair(making(ADAMW), [(2 * threads * BLOCK + 33,), (7,), (BLOCK + 9,)])
        for _ in range(2):
            pair.step()
        pair.assert_same()
    finally:
        torch.set_num_threads(before)


def test_gradients_of_different_dtypes_share_a_block() -> None:
    pair = Pair(making(ADAMW), [(5,), (6,), (7,), (8,)])
    for place in (1, 3):
        pair.low[place].grad_dtype = None
    for _ in range(3):
        for place, dtype in enumerate((BF16, torch.float32, BF16, torch.float16)):
            pair.low[place].grad = torch.randn(5 + place).to(dtype)
            pair.plain[place].grad = pair.low[place].grad.float()  # type: ignore[union-attr]
        pair.update()
        pair.own.step()
    pair.assert_same()


def test_channels_last_weights_are_done_in_their_own_order() -> None:
    pair = Pair(making(ADAMW), [(8, 4, 3, 3)])
    order = torch.channels_last
    for one in (*pair.low, *pair.plain):
        one.data = one.data.contiguous(memory_format=order)
    pair.masters[0].data = pair.masters[0].values().contiguous(memory_format=order)  # type: ignore[attr-defined]
    for _ in range(3):
        gradient = torch.randn(8, 4, 3, 3).to(BF16).contiguous(memory_format=order)
        pair.low[0].grad, pair.plain[0].grad = gradient, gradient.float()
        assert pair.update() == pair.masters
        pair.own.step()
    assert not pair.masters[0].values().is_contiguous()
    pair.assert_same()


def test_momentum_that_begins_later_for_some_parameters_begins_with_their_gradient() -> None:
    pair = Pair(making(SGD, momentum=0.9, dampening=0.4), [(4,), (4,)])
    pair.give_gradients()
    pair.low[1].grad = None
    assert pair.update() == pair.masters[:1]
    pair.give_gradients()
    second = pair.low[1].grad
    assert pair.update() == pair.masters
    assert second is not None
    assert torch.equal(pair.one.state[pair.masters[1]]["momentum_buffer"], second.float())  # type: ignore[index]


def test_sgd_without_momentum_keeps_no_state() -> None:
    pair = Pair(making(SGD))
    pair.step()
    assert not pair.one.state
