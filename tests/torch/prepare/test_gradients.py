"""Gradients of low parameters: whose they are, their dtype, and who may change them when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import autocast
from mezzo.torch.masters.params import Master

from .nets import BF16, ByHand, assert_rounded, batches, everything, held, loss_of, mlp, prepared, same, train


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _low(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.dtype is not torch.float32]


# Sums


def test_a_gradient_alone_is_low_and_a_sum_is_float32() -> None:
    model, optimizer = prepared(sgd)
    for _ in range(2):
        alone: list[list[Tensor]] = []
        for batch in batches(3):
            fresh, _ = prepared(sgd)
            fresh.load_state_dict(model.state_dict())
            loss_of(fresh, batch).backward()
            alone.append([one.grad.float() for one in _low(fresh) if one.grad is not None])
        for count, batch in enumerate(batches(3)):
            loss_of(model, batch).backward()
            for place, one in enumerate(_low(model)):
                assert one.grad is not None
                assert one.grad.dtype is (torch.float32 if count else BF16)
                expected = alone[0][place].clone()
                for each in alone[1 : count + 1]:
                    expected += each[place]
                assert torch.equal(one.grad.float(), expected)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("grad_dtype", [torch.float32, BF16], ids=str)
def test_a_grad_dtype_that_is_asked_for_is_that_of_all_gradients(grad_dtype: torch.dtype) -> None:
    model, optimizer = prepared(sgd, grad_dtype=grad_dtype)
    for _ in range(2):
        total: list[Tensor] = []
        for batch in batches(3):
            plain, _ = prepared(sgd)
            plain.load_state_dict(model.state_dict())
            loss_of(plain, batch).backward()
            new = [one.grad.to(grad_dtype) for one in _low(plain) if one.grad is not None]
            total = [a + b for a, b in zip(total, new, strict=True)] if total else new
            loss_of(model, batch).backward()
            assert same(total, [one.grad for one in _low(model) if one.grad is not None])
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True], ids=["for-loop", "fused"])
def test_accumulation_is_that_of_autocast_with_float32_weights(fused: bool) -> None:
    plain = mlp()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=fused)
    model, other = prepared(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=fused))
    data = batches(30)
    for start in range(0, 30, 3):
        for each, stepped in ((plain, optimizer), (model, other)):
            for batch in data[start : start + 3]:
                (loss_of(each, batch) / 3).backward()
            stepped.step()
            stepped.zero_grad()
    assert same([one.detach() for one in held(optimizer)], [one.detach() for one in held(other)])
    assert_rounded(other)


# Whose they are


def test_a_master_has_the_gradient_of_its_parameter_and_nothing_else() -> None:
    model, optimizer = prepared(sgd)
    loss_of(model, batches(1)[0]).backward()
    for one, parameter in zip(held(optimizer), model.parameters(), strict=True):
        assert one.grad is parameter.grad
    masters = [one for one in held(optimizer) if isinstance(one, Master)]
    assert len(masters) == len(_low(model)) == 4
    masters[0].grad = None
    assert masters[0].model_param.grad is None
    wide = torch.ones_like(masters[1], dtype=torch.float32)
    masters[1].grad = wide
    assert masters[1].model_param.grad is wide


@pytest.mark.parametrize("none", [True, False], ids=["set to none", "zeroed"])
@pytest.mark.parametrize("of", ["model", "optimizer"])
@pytest.mark.parametrize("micro", [1, 2])
def test_zero_grad_of_either_is_that_of_both(of: str, none: bool, micro: int) -> None:
    model, optimizer = prepared(lambda p: torch.optim.SGD(p, lr=0.1))
    one, two = batches(2)
    for batch in [one, two][:micro]:
        loss_of(model, batch).backward()
    (model if of == "model" else optimizer).zero_grad(set_to_none=none)
    for each in (*held(optimizer), *model.parameters()):
        assert each.grad is None if none else not each.grad.any()
    before = everything(model, optimizer)
    optimizer.step()
    assert same(before, everything(model, optimizer))
    other, second = prepared(lambda p: torch.optim.SGD(p, lr=0.1))
    assert train(model, optimizer, [two]) == train(other, second, [two])
    assert same(everything(model, optimizer), everything(other, second))


def test_zero_grad_after_a_failed_step_clears_the_model() -> None:
    model, optimizer = prepared(sgd)
    loss_of(model, batches(1)[0]).backward()
    optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(one.grad is not None and not one.grad.any() for one in model.parameters())
    optimizer.zero_grad()
    assert all(one.grad is None for one in model.parameters())


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("summed", [False, True], ids=["", "after a sum"])
def test_a_gradient_assigned_by_hand_is_what_the_step_uses(dtype: torch.dtype, summed: bool) -> None:
    model, optimizer = prepared(lambda p: torch.optim.SGD(p, lr=0.5))
    if summed:
        for batch in batches(2):
            loss_of(model, batch).backward()
        optimizer.zero_grad()
    before = [one.detach().clone() for one in held(optimizer)]
    for one in held(optimizer):
        one.grad = torch.full_like(one, 0.25, dtype=dtype if isinstance(one, Master) else torch.float32)
    optimizer.step()
    assert same([one - 0.125 for one in before], [one.detach() for one in held(optimizer)])
    assert_rounded(optimizer)


@pytest.mark.parametrize("summed", [False, True], ids=["", "after a sum"])
def test_a_low_gradient_may_be_assigned_to_a_low_parameter(summed: bool) -> None:
    model, optimizer = prepared(lambda p: torch.optim.SGD(p, lr=0.5))
    if summed:
        for batch in batches(2):
            loss_of(model, batch).backward()
        optimizer.zero_grad()
    before = [one.detach().clone() for one in held(optimizer)]
    for one in model.parameters():
        one.grad = torch.full_like(one, 0.25)
    optimizer.step()
    assert same([one - 0.125 for one in before], [one.detach() for one in held(optimizer)])


# Hooks of the optimizer


class Third(torch.optim.SGD):
    """Not PyTorch's own class."""


@pytest.mark.parametrize("over", ["model", "groups"])
@pytest.mark.parametrize("cls", [torch.optim.SGD, Third])
@pytest.mark.parametrize("fused", [False, True], ids=["for-loop", "fused"])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32], ids=str)
def test_a_hook_before_the_step_changes_what_the_step_uses(cls: Any, over: str, fused: bool, grad_dtype: Any) -> None:
    model, optimizer = prepared(lambda p: cls(p, lr=0.1, fused=fused), grad_dtype=grad_dtype)

    def clip(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        nn.utils.clip_grad_value_(model.parameters() if over == "model" else held(optimizer), 2**-7)

    optimizer.register_step_pre_hook(clip)
    reference = ByHand(mlp, model, lambda p: cls(p, lr=0.1))
    reference.optimizer.register_step_pre_hook(
        lambda optimizer, _args, _kwargs: nn.utils.clip_grad_value_(held(optimizer), 2**-7)
    )
    data = batches(3)
    assert train(model, optimizer, data) == [reference.step(batch) for batch in data]
    reference.assert_like(model, optimizer)


@pytest.mark.parametrize("fused", [False, True], ids=["for-loop", "fused"])
def test_a_hook_after_the_step_sees_the_new_weights(fused: bool) -> None:
    model, optimizer = prepared(lambda p: torch.optim.SGD(p, lr=0.1, fused=fused))
    seen: list[list[Tensor]] = []
    optimizer.register_step_post_hook(lambda *_: seen.append([one.detach().clone() for one in model.parameters()]))
    train(model, optimizer, batches(2))
    assert same(seen[-1], [one.detach() for one in model.parameters()])


@pytest.mark.parametrize("fused", [False, True], ids=["for-loop", "fused"])
@pytest.mark.parametrize("over", ["model", "groups"])
def test_what_a_hook_after_the_step_writes_to_weights_stays(over: str, fused: bool) -> None:
    model, optimizer = prepared(lambda p: torch.optim.SGD(p, lr=0.1, fused=fused))

    @torch.no_grad()
    def clamp(optimizer: Any, *_: Any) -> None:
        for one in model.parameters() if over == "model" else held(optimizer):
            one.clamp_(-0.125, 0.125)

    optimizer.register_step_post_hook(clamp)
    train(model, optimizer, batches(3))
    assert all(one.detach().abs().max() <= 0.125 for one in model.parameters())
    optimizer.zero_grad()
    optimizer.step()
    # A master that the written value is the rounding of stays as it is.
    assert all(one.detach().abs().max() <= 0.125 * (1 + 2**-8) for one in held(optimizer))
    assert_rounded(optimizer)


@pytest.mark.parametrize("none", [True, False], ids=["set to none", "zeroed"])
@pytest.mark.parametrize("fused", [False, True], ids=["for-loop", "fused"])
def test_zero_grad_in_a_hook_after_the_step_clears_the_model(fused: bool, none: bool) -> None:
    model, optimizer = prepared(lambda p: torch.optim.SGD(p, lr=0.1, fused=fused))
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad(set_to_none=none))
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert all(one.grad is None if none else not one.grad.any() for one in model.parameters())


def test_a_gradient_penalty_leaves_the_gradients_alone() -> None:
    model, optimizer = prepared(sgd)
    plain = mlp()
    other = sgd(plain.parameters())
    for batch in batches(3):
        for each, stepped in ((plain, other), (model, optimizer)):
            stepped.zero_grad()
            loss_of(each, batch).backward()
            with autocast("cpu", dtype=BF16):
                loss = nn.functional.cross_entropy(each(batch[0]), batch[1])
            found = torch.autograd.grad(loss, list(each.parameters()))
            assert all(bool(one.isfinite().all()) for one in found)
            stepped.step()
    assert same([one.detach() for one in held(other)], [one.detach() for one in held(optimizer)])
