"""What was unscaled is a gradient, not a parameter: legal scripts that replace gradients within an iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.errors import ScalerProtocolError
from mezzo.torch import GradScaler, step_merged

Class = Callable[..., torch.amp.GradScaler]


def parameters() -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))


def fresh_after_a_step(make: Class, **options: Any) -> Any:
    shared, own = parameters()
    first, second = torch.optim.SGD([shared], lr=1.0, **options), torch.optim.SGD([shared, own], lr=1.0, **options)
    scaler = make("cpu", init_scale=1024.0)
    scaler.scale((shared * 0.5).sum()).backward()
    scaler.step(first)
    shared.grad = None
    scaler.scale((shared * 0.25 + own * 0.125).sum()).backward()
    scaler.step(second)
    scaler.update()
    return shared, own


def zeroed_after_a_step(make: Class, **options: Any) -> Any:
    shared, own = parameters()
    first, second = torch.optim.SGD([shared], lr=1.0, **options), torch.optim.SGD([shared, own], lr=1.0, **options)
    scaler = make("cpu", init_scale=1024.0)
    for _ in range(2):
        scaler.scale((shared * 0.5).sum()).backward()
        scaler.step(first)
        second.zero_grad(set_to_none=False)
        scaler.scale((shared * 0.25 + own * 0.125).sum()).backward()
        scaler.step(second)
        scaler.update()
        second.zero_grad(set_to_none=False)
    return shared, own


def by_hand_after_a_step(make: Class, **options: Any) -> Any:
    shared, own = parameters()
    first, second = torch.optim.SGD([shared], lr=1.0, **options), torch.optim.SGD([shared, own], lr=1.0, **options)
    scaler = make("cpu", init_scale=1024.0)
    scaler.scale(shared.square().sum()).backward()
    scaler.step(first)
    loss = scaler.scale((shared.square() + own.square()).sum())
    shared.grad, own.grad = torch.autograd.grad(loss, [shared, own])
    scaler.step(second)
    scaler.update()
    return shared, own


def by_hand_after_an_update_without_a_step(make: Class, **options: Any) -> Any:
    weight, _ = parameters()
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0, **options), make("cpu", init_scale=1024.0)
    scaler.scale(weight.square().sum()).backward()
    scaler.unscale_(optimizer)
    scaler.update()
    (gradient,) = torch.autograd.grad(scaler.scale(weight.pow(3).sum()), [weight])
    weight.grad.data.copy_(gradient)
    scaler.step(optimizer)
    scaler.update()
    return (weight,)


def replaced_between_unscale_and_step(make: Class, **options: Any) -> Any:
    weight, _ = parameters()
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0, **options), make("cpu", init_scale=1024.0)
    scaler.scale(weight.square().sum()).backward()
    scaler.unscale_(optimizer)
    weight.grad = weight.grad * 0.25
    scaler.step(optimizer)
    scaler.update()
    return (weight,)


def transform_while_unscaled(make: Class, **options: Any) -> Any:
    weight, other = parameters()
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0, **options), make("cpu", init_scale=1024.0)
    scaler.scale(weight.square().sum()).backward()
    scaler.unscale_(optimizer)
    gradient = torch.func.grad(lambda x: scaler.scale(x.square().sum()))(other.detach())
    scaler.step(optimizer)
    scaler.update()
    return weight, gradient


SCRIPTS = [
    fresh_after_a_step,
    zeroed_after_a_step,
    by_hand_after_a_step,
    by_hand_after_an_update_without_a_step,
    replaced_between_unscale_and_step,
    transform_while_unscaled,
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_legal_script_does_what_it_does_under_pytorch(script: Callable[..., Any], fused: bool) -> None:
    got, expected = script(GradScaler, fused=fused), script(torch.amp.GradScaler, fused=fused)
    assert [one.tolist() for one in got] == [one.tolist() for one in expected]


class Passing:
    """A wrapper that passes attributes on to the optimizer in it, both ways."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        object.__setattr__(self, "inner", inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "inner"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.inner, name)


@pytest.mark.parametrize("factor", [1.0, torch.inf])
def test_a_wrapper_passes_the_contract_on(factor: float) -> None:
    weight, _ = parameters()
    inner = torch.optim.SGD([weight], lr=0.5, fused=True)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale((weight * factor).sum()).backward()
    scaler.step(Passing(inner))  # type: ignore[arg-type]
    assert weight.tolist() == ([0.5, 0.5] if factor == 1.0 else [1.0, 1.0])
    assert not hasattr(inner, "grad_scale")
    assert not hasattr(inner, "found_inf")


def test_a_backward_pass_that_failed_is_made_up_for() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, _gradient: Tensor) -> Tensor:
            raise ArithmeticError

    weight, other = parameters()
    optimizer, scaler = torch.optim.SGD([weight, other], lr=1.0), GradScaler("cpu", init_scale=1024.0)
    scaler.scale((weight * 0.5).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(ArithmeticError):
        scaler.scale(Fails.apply(weight * 3).sum()).backward()
    optimizer.zero_grad()
    scaler.scale((weight * 0.25).sum()).backward()
    scaler.step(optimizer)
    assert weight.tolist() == [0.75, 0.75]


def test_a_step_in_a_hook_of_a_late_backward_pass() -> None:
    first, second = parameters()
    early, late = torch.optim.SGD([first], lr=1.0), torch.optim.SGD([second], lr=1.0)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale((first * 0.5).sum()).backward()
    scaler.unscale_(early)
    second.register_post_accumulate_grad_hook(lambda _: scaler.step(late))
    scaler.scale((first * 0.25 + second * 0.25).sum()).backward()
    scaler.step(early)
    assert (first.tolist(), second.tolist()) == ([0.25, 0.25], [0.75, 0.75])


def test_clipping_knows_gradients_that_outlive_an_update() -> None:
    often, seldom = parameters()
    first, second = torch.optim.SGD([often], lr=1.0), torch.optim.SGD([seldom], lr=1.0)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale((often * 3 + seldom * 4).sum()).backward()
    scaler.step(first)
    scaler.update()
    assert scaler.clip_grad_norm_([seldom], 100.0).item() == pytest.approx(4 * 2**0.5)
    assert scaler.clip_grad_norm_([often], 100.0).item() == pytest.approx(3 * 2**0.5)
    scaler.clip_grad_norm_(second, 1.0)
    scaler.step(second)
    assert (1 - seldom).norm().item() == pytest.approx(1.0, abs=1e-5)


def test_one_refused_gradient_leaves_the_others_as_they_were() -> None:
    weight = nn.Parameter(torch.ones(2))
    other = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer, scaler = torch.optim.SGD([weight, other], lr=1.0), GradScaler("cpu", init_scale=1024.0)
    scaler.scale((weight * 0.5).sum()).backward()
    other.grad = torch.ones(1, dtype=torch.float64).expand(3)  # the kernel refuses to write into it
    with pytest.raises(RuntimeError, match="single memory location"):
        scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [512.0, 512.0]
    other.grad = torch.full((3,), 256.0, dtype=torch.float64)
    scaler.step(optimizer)
    assert (weight.tolist(), other.tolist()) == ([0.5, 0.5], [0.75, 0.75, 0.75])


def test_merge_regions_do_not_nest_and_want_their_own_step() -> None:
    weight, _ = parameters()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scalers = [GradScaler("cpu", init_scale=4.0), GradScaler("cpu", init_scale=64.0)]
    with pytest.raises(ScalerProtocolError, match=r"merge\(\) regions of one optimizer cannot be nested"):
        with scalers[0].merge(optimizer), scalers[1].merge(optimizer):
            pass
    for scaler in scalers:
        with scaler.merge(optimizer):
            scaler.scale((weight * 0.25).sum()).backward()
    with pytest.raises(ScalerProtocolError, match=r"Call step_merged\(optimizer, scalers\)"):
        scalers[0].step(optimizer)
    step_merged(optimizer, scalers)
    assert weight.tolist() == [0.5, 0.5]


def test_nothing_is_kept_alive() -> None:
    import gc
    import weakref

    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), GradScaler("cpu")
    for _ in range(200):
        optimizer.zero_grad()
        held = scaler.scale((weight * torch.inf).sum())
        held.backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(scaler._open._losses) == 0
    gone = weakref.ref(optimizer)
    del optimizer, weight, held
    gc.collect()
    assert gone() is None
