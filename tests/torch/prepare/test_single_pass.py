"""One pass over masters, moments and weights: what it gives, and what it leaves to the optimizer's own step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .single_pass_pairs import ADAM, ADAMW, BF16, SGD, Pair, both, kinds, making

# torch.compile's own, at its first use.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")


@both
def test_a_float32_gradient_stays_as_it_is(compiled: bool) -> None:
    pair = Pair(making(ADAMW), gradient=torch.float32)
    pair.step(compiled=compiled)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(pair.low, pair.plain, strict=True))  # type: ignore[arg-type]


@both
def test_the_version_of_a_weight_moves(compiled: bool) -> None:
    pair = Pair(making(ADAMW))
    before = [one._version for one in pair.low]
    pair.step(compiled=compiled)
    assert all(one._version > version for one, version in zip(pair.low, before, strict=True))


@both
def test_a_learning_rate_that_changes_counts_at_the_next_step(compiled: bool) -> None:
    pair = Pair(making(ADAMW))
    for lr in (0.01, 0.02, 0.005):
        pair.one.param_groups[0]["lr"] = pair.own.param_groups[0]["lr"] = lr
        pair.step(compiled=compiled)
    pair.assert_close(3)


@both
def test_the_optimizers_own_step_goes_on_from_the_state(compiled: bool) -> None:
    pair = Pair(making(ADAM, weight_decay=0.1))
    pair.step(compiled=compiled)
    state = pair.one.state_dict()
    fresh = ADAM([one.values() for one in pair.masters], fused=True)
    fresh.load_state_dict(state)
    pair.give_gradients()
    for values, plain in zip(fresh.param_groups[0]["params"], pair.plain, strict=True):
        values.grad = plain.grad
    fresh.step()
    pair.own.step()
    for values, plain in zip(fresh.param_groups[0]["params"], pair.plain, strict=True):
        # As in `assert_close`.
        assert torch.allclose(values, plain, rtol=0, atol=8 * 8 * torch.finfo(torch.float32).eps)


@both
def test_sgd_whose_first_step_is_skipped_has_its_first_step_next(compiled: bool) -> None:
    pair = Pair(making(SGD, momentum=0.9, dampening=0.4))
    pair.give_gradients()
    pair.one.found_inf = torch.ones(())  # type: ignore[attr-defined]
    assert pair.update(compiled=compiled) == pair.masters
    assert not pair.one.state
    pair.one.found_inf = None  # type: ignore[attr-defined]
    for _ in range(2):
        pair.step(compiled=compiled)
    pair.assert_close(2)


# Under a scaler


@kinds
@both
def test_gradients_are_divided_by_the_scale(kind: Any, options: dict[str, Any], compiled: bool) -> None:
    pair = Pair(making(kind, **options))
    for optimizer in (pair.one, pair.own):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(3.0), torch.zeros(())  # type: ignore[attr-defined]
    for _ in range(3):
        pair.step(compiled=compiled)
    pair.assert_close(3)
    if not compiled:
        pair.assert_same()


@kinds
@both
def test_a_step_that_is_skipped_changes_nothing(kind: Any, options: dict[str, Any], compiled: bool) -> None:
    pair = Pair(making(kind, **options))
    pair.step(compiled=compiled)
    pair.low[1].data[0] = 7.0  # by somebody else; rounding the master again would undo it
    before = pair.values()
    pair.one.grad_scale, pair.one.found_inf = torch.tensor(2.0), torch.ones(())  # type: ignore[attr-defined]
    pair.give_gradients()
    pair.low[0].grad.fill_(torch.nan)  # type: ignore[union-attr]
    assert pair.update(compiled=compiled) == pair.masters
    assert all(torch.equal(a, b) for a, b in zip(before, pair.values(), strict=True))


# What is left to the optimizer


def left_alone(pair: Pair, *, compiled: bool) -> bool:
    before = pair.values()
    done = pair.update(compiled=compiled)
    return not done and all(torch.equal(a, b) for a, b in zip(before, pair.values(), strict=True))


@pytest.mark.parametrize("fused", [None, False])
def test_blocks_are_for_fused_groups(fused: bool | None) -> None:
    pair = Pair(making(ADAMW, fused=fused))
    pair.give_gradients()
    assert left_alone(pair, compiled=False)


class _OwnAdamW(torch.optim.AdamW):
    pass


@both
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (_OwnAdamW, {}),
        (torch.optim.NAdam, {"fused": None}),
        (torch.optim.Adagrad, {"fused": True}),
        (ADAMW, {"capturable": True}),
        (SGD, {"differentiable": True, "fused": False}),
    ],
    ids=["subclass", "nadam", "adagrad", "capturable", "differentiable"],
)
def test_other_optimizers_are_left_to_themselves(kind: Any, options: dict[str, Any], compiled: bool) -> None:
    options = {name: value for name, value in options.items() if value is not None}
    pair = Pair(lambda parameters: kind(parameters, **options))
    for group in pair.one.param_groups:
        group.setdefault("fused", False)
    pair.give_gradients()
    assert left_alone(pair, compiled=compiled)


@both
def test_parameters_without_gradient_and_without_master_are_left(compiled: bool) -> None:
    pair = Pair(making(ADAMW), [(4,), (5,)])
    plain = nn.Parameter(torch.ones(3))
    plain.grad = torch.ones(3)
    pair.one.param_groups[0]["params"].append(plain)
    pair.give_gradients()
    pair.low[0].grad = None
    assert pair.update(compiled=compiled) == pair.masters[1:]
    assert torch.equal(plain, torch.ones(3))
    assert list(pair.one.state) == pair.masters[1:]


@both
def test_a_sparse_gradient_is_left(compiled: bool) -> None:
    pair = Pair(making(SGD), [(4, 2)])
    pair.low[0].grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2, dtype=BF16), (4, 2), check_invariants=True)
    assert left_alone(pair, compiled=compiled)


@both
@pytest.mark.parametrize("of", ["gradient", "master", "moment"])
def test_tensors_in_another_order_of_memory_are_left(of: str, compiled: bool) -> None:
    pair = Pair(making(ADAMW), [(4, 6)])
    pair.step(compiled=compiled)
    pair.give_gradients()
    state = pair.one.state[pair.masters[0]]  # type: ignore[index]
    if of == "gradient":
        pair.low[0].grad = torch.randn(6, 4).to(BF16).T
    elif of == "master":
        pair.masters[0].data = torch.randn(6, 4).T  # type: ignore[attr-defined]
    else:
        state["exp_avg"] = torch.randn(6, 4).T
    assert left_alone(pair, compiled=compiled)


@both
def test_a_gradient_with_gaps_is_left(compiled: bool) -> None:
    pair = Pair(making(ADAMW), [(4, 6)])
    pair.low[0].grad = torch.ones(1, 1, dtype=BF16).expand(4, 6)
    assert left_alone(pair, compiled=compiled)
    pair.low[0].grad = torch.ones(4, 12, dtype=BF16)[:, ::2]
    assert left_alone(pair, compiled=compiled)


@both
@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(exp_avg=state["exp_avg"].to(BF16)),
        lambda state: state.update(step=3),
        lambda state: state.pop("exp_avg_sq"),
        lambda state: state.pop("step"),
    ],
    ids=["low moment", "step that is no tensor", "no second moment", "no step"],
)
def test_a_state_that_the_optimizer_would_not_make_is_left(change: Callable[[Any], Any], compiled: bool) -> None:
    pair = Pair(making(ADAMW), [(4,)])
    pair.step(compiled=compiled)
    pair.give_gradients()
    change(pair.one.state[pair.masters[0]])  # type: ignore[index]
    assert pair.update(compiled=compiled) == []


@both
def test_under_a_dispatch_mode_all_is_left(compiled: bool) -> None:
    pair = Pair(making(ADAMW))
    pair.give_gradients()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert pair.update(compiled=compiled) == []


def test_a_learning_rate_on_another_device_is_not_read() -> None:
    pair = Pair(making(ADAMW))
    pair.one.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    pair.give_gradients()
    assert left_alone(pair, compiled=False)
    assert left_alone(pair, compiled=True)
