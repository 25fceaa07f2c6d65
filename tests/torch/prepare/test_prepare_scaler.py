"""Gradient scalers over prepared optimizers: what they unscale and clip, and what a skipped step leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import GradScaler, master_params

from .nets import BF16, ByHand, Make, assert_rounded, batches, everything, held, loss_of, mlp, prepared, same

SCALERS = {"torch": torch.amp.GradScaler, "mezzo": GradScaler}
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "masters": {},
    "masters, stochastic": {"rounding": "stochastic"},
    "kahan": {"masters": "kahan"},
    "kahan, stochastic": {"masters": "kahan", "rounding": "stochastic"},
    "stochastic": {"masters": False, "rounding": "stochastic"},
    "none": {"masters": False},
}

scalers = pytest.mark.parametrize("which", SCALERS)
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
dtypes = pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def _backward(scaler: Any, model: nn.Module, batch: Any, dtype: torch.dtype) -> None:
    scaler.scale(loss_of(model, batch, dtype)).backward()


def _step(scaler: Any, model: nn.Module, optimizer: Any, batch: Any, dtype: torch.dtype) -> None:
    optimizer.zero_grad()
    _backward(scaler, model, batch, dtype)
    scaler.step(optimizer)
    scaler.update()


@scalers
@optimizers
@dtypes
def test_steps_are_those_of_float32_weights_under_the_same_scaler(which: str, make: Make, dtype: torch.dtype) -> None:
    plain = mlp()
    optimizer = make(plain.parameters())
    model, other = prepared(make, dtype=dtype)
    first, second = (SCALERS[which]("cpu", init_scale=2.0**30, growth_interval=3) for _ in range(2))
    scales = []
    for batch in batches(10):
        _step(first, plain, optimizer, batch, dtype)
        _step(second, model, other, batch, dtype)
        assert first.get_scale() == second.get_scale()
        scales.append(second.get_scale())
    # A scale is a power of two, and takes nothing from bfloat16 numbers.
    assert same([one.detach() for one in plain.parameters()], [one.detach() for one in held(other)])
    assert_rounded(other)
    assert max(scales) > scales[-1] if dtype is torch.float16 else scales[-1] == 2.0**33


@scalers
@pytest.mark.parametrize("name", ["SGD", "SGD fused", "AdamW fused", "Adagrad fused"])
@variants
@pytest.mark.parametrize(("dtype", "unscaled"), [(BF16, False), (torch.float16, True)], ids=["bfloat16", "float16"])
def test_a_skipped_step_leaves_everything_alone(
    which: str, name: str, dtype: torch.dtype, options: dict[str, Any], unscaled: bool
) -> None:
    if options == {"masters": False} and (dtype is torch.float16 or name == "SGD fused"):
        # Adam's eps is 0 in float16, torch's scaler takes no float16 gradients, and PyTorch 2.13's fused SGD leaves low
        # parameters on a CPU as they are (https://github.com/pytorch/pytorch/issues/191763).
        name, which = "SGD", "mezzo"
    model, optimizer = prepared(OPTIMIZERS[name], dtype=dtype, **options)
    scaler = SCALERS[which]("cpu", init_scale=2.0**10, growth_interval=2)
    one, two, three = batches(3)
    _step(scaler, model, optimizer, one, dtype)
    before = everything(model, optimizer)
    optimizer.zero_grad()
    _backward(scaler, model, two, dtype)
    model[3].weight.grad[0, 0] = torch.inf
    if unscaled:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert same(before, everything(model, optimizer))
    assert scaler.get_scale() == 2.0**9
    optimizer.zero_grad()
    assert all(each.grad is None for each in model.parameters())
    for _ in range(2):
        _step(scaler, model, optimizer, three, dtype)
    assert scaler.get_scale() == 2.0**10
    assert not same(before[:1], everything(model, optimizer)[:1])


@scalers
@pytest.mark.parametrize("options", [{"rounding": "stochastic"}, {"masters": "kahan"}], ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["for-loop", "fused"])
def test_a_run_with_a_skipped_step_goes_on_as_one_without(which: str, options: dict[str, Any], fused: bool) -> None:
    one, two, three = batches(3)
    results = []
    for overflow in (False, True):
        model, optimizer = prepared(lambda p: torch.optim.Adam(p, lr=1e-2, fused=fused), **options)
        scaler = SCALERS[which]("cpu", init_scale=2.0**10)
        _step(scaler, model, optimizer, one, BF16)
        if overflow:
            optimizer.zero_grad()
            _backward(scaler, model, two, BF16)
            model[0].bias.grad[0] = torch.nan
            scaler.step(optimizer)
            scaler.update()
        _step(scaler, model, optimizer, three, BF16)
        results.append(everything(model, optimizer))
    assert same(*results)


@scalers
@pytest.mark.parametrize("over", ["model", "masters", "groups"])
@pytest.mark.parametrize("fused", [False, True], ids=["for-loop", "fused"])
@dtypes
def test_gradients_are_unscaled_and_then_clipped(which: str, over: str, fused: bool, dtype: torch.dtype) -> None:
    def make(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=1e-2, fused=fused)

    model, optimizer = prepared(make, dtype=dtype, grad_dtype=torch.float32)
    reference = ByHand(mlp, model, make)
    scaler = SCALERS[which]("cpu", init_scale=2.0**8)
    for batch in batches(4):
        optimizer.zero_grad()
        _backward(scaler, model, batch, dtype)
        scaler.unscale_(optimizer)
        clipped = {"model": model.parameters(), "masters": master_params(optimizer), "groups": held(optimizer)}[over]
        norm = nn.utils.clip_grad_norm_(clipped, 0.1)
        scaler.step(optimizer)
        scaler.update()
        _by_hand(reference, batch, dtype, 2.0**8)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(reference.masters, 0.1))
        reference.optimizer.step()
        reference.refresh()
    reference.assert_like(model, optimizer)


def _by_hand(reference: ByHand, batch: Any, dtype: torch.dtype, scale: float) -> None:
    reference.refresh()
    reference.model.zero_grad()
    (loss_of(reference.model, batch, dtype) * scale).backward()
    for master, one in zip(reference.masters, reference.low, strict=True):
        assert one.grad is not None
        master.grad = one.grad.float() / scale


@scalers
@dtypes
def test_accumulated_gradients_are_sums_in_float32(which: str, dtype: torch.dtype) -> None:
    plain = mlp()
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    model, other = prepared(lambda p: torch.optim.Adam(p, lr=1e-2), dtype=dtype)
    data = batches(9)
    first, second = (SCALERS[which]("cpu", init_scale=2.0**8) for _ in range(2))
    for start in range(0, 9, 3):
        for scaler, each, stepped in ((first, plain, optimizer), (second, model, other)):
            stepped.zero_grad()
            for batch in data[start : start + 3]:
                _backward(scaler, each, batch, dtype)
            scaler.unscale_(stepped)
            assert {one.grad.dtype for one in each.parameters()} == {torch.float32}
            scaler.step(stepped)
            scaler.update()
    assert same([one.detach() for one in plain.parameters()], [one.detach() for one in held(other)])


@pytest.mark.parametrize(
    ("search", "bad", "dtype"),
    [(None, 3, BF16), ("strong_wolfe", 1, BF16), ("strong_wolfe", 3, torch.float16)],
    ids=["plain", "first", "line search"],
)
@variants
def test_an_overflow_in_a_closure_puts_everything_back(
    search: Any, bad: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    model, optimizer = prepared(
        lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=5, line_search_fn=search), dtype=dtype, **options
    )
    scaler = GradScaler("cpu", init_scale=2.0**6)
    calls = [0, -1]
    batch = batches(1)[0]

    def closure() -> Tensor:
        calls[0] += 1
        optimizer.zero_grad()
        loss = loss_of(model, batch, dtype)
        scaler.scale(loss).backward()
        if calls[0] == calls[1]:
            model[0].weight.grad[0, 0] = torch.inf
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    before = everything(model, optimizer)
    calls[:] = [0, bad]
    scaler.step(optimizer, closure)
    scaler.update()
    assert calls[0] == bad
    assert scaler.get_scale() == 2.0**5
    assert same(before, everything(model, optimizer))
    calls[:] = [0, -1]
    scaler.step(optimizer, closure)
    assert all(bool(one.isfinite().all()) for one in model.parameters())
    assert not same(before, everything(model, optimizer))


@variants
def test_a_closure_that_raises_under_the_scaler_puts_everything_back(options: dict[str, Any]) -> None:
    model, optimizer = prepared(lambda p: torch.optim.LBFGS(p, lr=0.5, line_search_fn="strong_wolfe"), **options)
    scaler = GradScaler("cpu", init_scale=2.0**6)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError
        optimizer.zero_grad()
        loss = loss_of(model, batches(1)[0])
        scaler.scale(loss).backward()
        return loss

    before = everything(model, optimizer)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer, closure)
    assert same(before, everything(model, optimizer))


@variants
@pytest.mark.parametrize("fails", [False, True], ids=["overflow", "error"])
def test_what_was_written_to_a_weight_before_a_step_that_is_put_back_stays(
    options: dict[str, Any], fails: bool
) -> None:
    model, optimizer = prepared(lambda p: torch.optim.LBFGS(p, lr=0.5, line_search_fn="strong_wolfe"), **options)
    scaler = GradScaler("cpu", init_scale=2.0**6)
    calls, batch = [], batches(1)[0]

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        if len(calls) == 3:
            if fails:
                raise ZeroDivisionError
            model[0].weight.grad[0, 0] = torch.inf
        return loss

    with torch.no_grad():
        model[0].weight[0] = 0.75
    before = [one.detach().clone() for one in model.parameters()]
    if fails:
        with pytest.raises(ZeroDivisionError):
            scaler.step(optimizer, closure)
    else:
        scaler.step(optimizer, closure)
        scaler.update()
    assert len(calls) == 3
    assert same(before, [one.detach() for one in model.parameters()])
    optimizer.zero_grad()
    optimizer.step(lambda: torch.zeros(()))
    assert same(before, [one.detach() for one in model.parameters()])
