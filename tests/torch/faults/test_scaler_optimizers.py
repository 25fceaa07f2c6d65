"""Section F, third part: optimizers that scale by themselves, and optimizers that call a closure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from .amps import Amp
from .training import INF, backward, plain, weight

# F5: a grad_scale that the user has set


class Refusing(SGD):
    """Raises in its step, with the contract of a fused optimizer."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None:
        msg = "not today"
        raise ArithmeticError(msg)


@pytest.mark.parametrize("unscaled_by_hand", [False, True])
def test_f5_a_grad_scale_of_the_users_counts_and_stays(amp: Amp, unscaled_by_hand: bool) -> None:
    """F5: gradients divided by the user's scale and by the scaler's, in each step and not only in the first."""
    scaler, w = amp.scaler(), weight(0.0)
    optimizer = plain([w], fused=True)
    mine = torch.tensor(4.0)
    optimizer.grad_scale = mine
    for expected in (-2.0, -4.0):
        optimizer.zero_grad()
        backward(scaler, [w], 8.0)
        if unscaled_by_hand:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert w.item() == expected
        assert optimizer.grad_scale is mine


@pytest.mark.parametrize("preset", [False, True])
def test_f5_nothing_is_left_on_an_optimizer_whose_step_raises(amp: Amp, preset: bool) -> None:
    """F5: neither PyTorch's attributes nor the loss of the user's."""
    scaler, w = amp.scaler(), weight(0.0)
    optimizer = Refusing([w], lr=1.0)
    if preset:
        optimizer.grad_scale = torch.tensor(4.0)
    before = getattr(optimizer, "grad_scale", None)
    backward(scaler, [w], 8.0)
    with pytest.raises(ArithmeticError, match="not today"):
        scaler.step(optimizer)
    assert {"grad_scale", "found_inf"} & vars(optimizer).keys() == ({"grad_scale"} if preset else set())
    assert getattr(optimizer, "grad_scale", None) is before


# F6: closures


def quadratic(w: Tensor) -> Tensor:
    # Flat enough for L-BFGS not to normalize its first direction, which would hide a wrong scale.
    return ((w - torch.tensor([1.0, -2.0])) ** 2 * torch.tensor([1.0, 3.0])).sum() / 32


def lbfgs(parameters: list[nn.Parameter]) -> Any:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn=None)


def adam(parameters: list[nn.Parameter]) -> Any:
    # With an eps that counts: else Adam's steps are the same for gradients of any scale.
    return Adam(parameters, lr=0.25, eps=0.01)


def fused(parameters: list[nn.Parameter]) -> Any:
    return plain(parameters, momentum=0.5, fused=True)


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("make", [plain, adam, lbfgs])
def test_f6_a_closure_steps_with_unscaled_gradients(
    amp: Amp, make: Callable[[list[nn.Parameter]], Any], by_keyword: bool
) -> None:
    """F6: keyword closures were refused, positional ones took the scaled gradient: 6144 instead of 6."""
    scaler, w, exact = amp.scaler(), weight(0.0, 0.0), weight(0.0, 0.0)
    optimizer, reference = make([w]), make([exact])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = quadratic(w)
        scaler.scale(loss).backward()
        return loss

    def exact_closure() -> Tensor:
        reference.zero_grad()
        loss = quadratic(exact)
        loss.backward()
        return loss

    # Gradients that an earlier iteration left: with these PyTorch takes the positional closure.
    scaler.scale(quadratic(w)).backward()
    for _ in range(3):
        loss = scaler.step(optimizer, closure=closure) if by_keyword else scaler.step(optimizer, closure)
        scaler.update()
        expected = reference.step(exact_closure)
        assert loss.item() == expected.item()
    # The scale is a power of two, so the unscaled gradients are the reference's to the last bit.
    assert w.equal(exact)


@pytest.mark.parametrize(("make", "overflow_at"), [(lbfgs, 1), (lbfgs, 3), (adam, 1), (fused, 1)])
def test_f6_an_overflow_within_a_closure_leaves_all_as_it_was(
    amp: Amp, make: Callable[[list[nn.Parameter]], Any], overflow_at: int
) -> None:
    """F6: in the first evaluation or in the third: weights and the optimizer's state are those of before."""
    scaler, w = amp.scaler(), weight(0.0, 0.0)
    optimizer, calls, overflows = make([w]), 0, False

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = quadratic(w) * (INF if overflows and calls == overflow_at else 1.0)
        scaler.scale(loss).backward()
        return loss

    # Before the first loss is scaled: it is the closure that scales it.
    scaler.step(optimizer, closure)
    scaler.update()
    before, state = w.detach().clone(), copy.deepcopy(optimizer.state_dict())
    calls, overflows = 0, True
    scaler.step(optimizer, closure)
    scaler.update()
    assert calls >= overflow_at
    assert w.equal(before)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0, equal_nan=True)
    assert not scaler.stepped(optimizer)
    assert scaler.get_scale() == 2.0**15
    overflows = False
    scaler.step(optimizer, closure)
    assert quadratic(w) < quadratic(before)
