"""Prepared models train as autocast with float32 weights does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mezzo.torch import GradScaler, autocast, prepare

from .nets import BF16, Make, assert_rounded, batches, convnet, encoder, held, loss_of, mlp, prepared, same, train

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adam for-loop": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "AdamW amsgrad fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, amsgrad=True),
}


@pytest.mark.parametrize("net", [mlp, convnet, encoder])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_prepared_run_is_bit_for_bit_autocast_with_float32_weights(make: Make, net: Callable[[], nn.Module]) -> None:
    plain = net()
    optimizer = make(plain.parameters())
    model, other = prepared(make, net)
    assert any(one.dtype is BF16 for one in model.parameters())
    data = batches(12)
    assert train(model, other, data) == train(plain, optimizer, data)
    assert same([one.detach() for one in plain.parameters()], [one.detach() for one in held(other)])
    assert same(list(plain.buffers()), list(model.buffers()))
    assert_rounded(other)


@pytest.mark.parametrize("make", [OPTIMIZERS["SGD"], OPTIMIZERS["Adam fused"]], ids=["SGD", "Adam fused"])
def test_a_run_in_torchs_autocast_is_that_in_mezzos(make: Make) -> None:
    model, optimizer = prepared(make)
    other, second = prepared(make)
    data = batches(10)
    train(model, optimizer, data)
    for x, y in data:
        second.zero_grad()
        with torch.autocast("cpu", dtype=BF16):
            loss = nn.functional.cross_entropy(other(x), y)
        loss.backward()
        second.step()
    assert same(list(model.state_dict().values()), list(other.state_dict().values()))
    assert same([one.detach() for one in held(optimizer)], [one.detach() for one in held(second)])


@pytest.mark.parametrize("grad_dtype", [None, torch.float32], ids=str)
def test_clipping_over_the_model_is_that_of_float32_weights(grad_dtype: torch.dtype | None) -> None:
    """With ``grad_dtype=torch.float32``; alone and low, gradients are scaled in bfloat16, to 8 bits."""
    make = OPTIMIZERS["SGD"]
    plain = mlp()
    optimizer = make(plain.parameters())
    model, other = prepared(make, grad_dtype=grad_dtype)
    for batch in batches(10):
        norms = []
        for each, stepped in ((plain, optimizer), (model, other)):
            stepped.zero_grad()
            loss_of(each, batch).backward()
            norms.append(nn.utils.clip_grad_norm_(each.parameters(), 0.1))
            stepped.step()
        # A norm of low gradients has their 8 bits.
        torch.testing.assert_close(norms[0], norms[1].float(), rtol=0 if grad_dtype else 2e-2, atol=0)
    weights = [one.detach() for one in plain.parameters()], [one.detach() for one in held(other)]
    if grad_dtype is None:
        for one, master in zip(*weights, strict=True):
            # Ten steps of lr 0.1 (momentum: tenfold at most) over gradients of norm 0.1, each to 2**-8.
            torch.testing.assert_close(master, one, rtol=0, atol=1e-2)
    else:
        assert same(*weights)
    assert_rounded(other)


# The digits


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data, target = load_digits(return_X_y=True)
    x, y = torch.tensor(data, dtype=torch.float32) / 16, torch.tensor(target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


def _accuracy(digits: Any, dtype: torch.dtype | None, scaler: Any, **options: Any) -> float:
    """Train for 300 steps; give the share of the held-out digits that are told right."""
    x, y, test_x, test_y = digits
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if dtype is not None:
        model, optimizer = prepare(model, optimizer, dtype=dtype, **options)
    choose = torch.Generator().manual_seed(1)
    for _ in range(300):
        some = torch.randint(0, len(x), (64,), generator=choose)
        optimizer.zero_grad()
        with autocast("cpu", dtype=dtype or BF16, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(x[some]), y[some])
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    with torch.no_grad(), autocast("cpu", dtype=dtype or BF16, enabled=dtype is not None):
        right = model(test_x).argmax(1) == test_y
    return right.float().mean().item()


@pytest.fixture(scope="module")
def float32_accuracy(digits: Any) -> float:
    return _accuracy(digits, None, None)


VARIANTS: dict[str, dict[str, Any]] = {
    "masters": {},
    "masters, stochastic": {"rounding": "stochastic"},
    "kahan": {"masters": "kahan"},
    "stochastic": {"masters": False, "rounding": "stochastic"},
    "low gradients": {"grad_dtype": BF16},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_bfloat16_ends_within_one_per_cent_of_float32(
    digits: Any, float32_accuracy: float, options: dict[str, Any]
) -> None:
    assert float32_accuracy > 0.95
    assert abs(_accuracy(digits, BF16, None, **options) - float32_accuracy) <= 0.01


@pytest.mark.parametrize("name", ["masters", "masters, stochastic", "kahan", "stochastic"])
def test_float16_with_a_scaler_ends_within_one_per_cent_of_float32(
    digits: Any, float32_accuracy: float, name: str
) -> None:
    # The first scale is too large: some steps are skipped.
    scaler = GradScaler("cpu", init_scale=2.0**24, growth_interval=50)
    accuracy = _accuracy(digits, torch.float16, scaler, **VARIANTS[name])
    assert scaler.get_scale() < 2.0**24
    assert abs(accuracy - float32_accuracy) <= 0.01
