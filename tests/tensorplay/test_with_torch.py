"""PyTorch and TensorPlay in one process: neither's regions, casts, backward passes or policies touch the other's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import tensorplay as tp
import torch

import mezzo.tensorplay
import mezzo.torch

from .defects import run_python

FRAMEWORKS: dict[str, Any] = {"torch": torch, "tensorplay": tp}
REGIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "torch": {"mezzo": mezzo.torch.autocast, "native": torch.autocast},
    "tensorplay": {"mezzo": mezzo.tensorplay.autocast, "native": tp.autocast},
}


def product_dtype(name: str) -> str:
    framework = FRAMEWORKS[name]
    return str((framework.ones(2, 2) @ framework.ones(2, 2)).dtype).rpartition(".")[2]


def product_dtypes() -> tuple[str, str]:
    return product_dtype("torch"), product_dtype("tensorplay")


def region(name: str, package: str, low: str, **options: Any) -> Any:
    return REGIONS[name][package]("cpu", dtype=getattr(FRAMEWORKS[name], low), **options)


packages = pytest.mark.parametrize(
    ("torchs", "tensorplays"), [("mezzo", "mezzo"), ("native", "mezzo"), ("mezzo", "native")]
)


@packages
def test_a_region_of_one_does_not_reach_the_other(torchs: str, tensorplays: str) -> None:
    with region("torch", torchs, "bfloat16"):
        assert product_dtypes() == ("bfloat16", "float32")
        assert not tp.is_autocast_enabled("cpu")
    with region("tensorplay", tensorplays, "bfloat16"):
        assert product_dtypes() == ("float32", "bfloat16")
        assert not torch.is_autocast_enabled("cpu")
    assert product_dtypes() == ("float32", "float32")


@packages
def test_nested_regions_have_a_dtype_each(torchs: str, tensorplays: str) -> None:
    with region("torch", torchs, "bfloat16"), region("tensorplay", tensorplays, "float16"):
        assert product_dtypes() == ("bfloat16", "float16")
        with region("torch", torchs, "float16", enabled=False):
            assert product_dtypes() == ("float32", "float16")
        with region("tensorplay", tensorplays, "bfloat16", enabled=False):
            assert product_dtypes() == ("bfloat16", "float32")
        assert product_dtypes() == ("bfloat16", "float16")
    assert product_dtypes() == ("float32", "float32")


@packages
@pytest.mark.parametrize("first", ["torch", "tensorplay"])
def test_interleaved_regions_close_in_any_order(torchs: str, tensorplays: str, first: str) -> None:
    regions = {
        "torch": region("torch", torchs, "bfloat16"),
        "tensorplay": region("tensorplay", tensorplays, "bfloat16"),
    }
    (second,) = set(regions) - {first}
    with ExitStack() as outer, ExitStack() as inner:
        outer.enter_context(regions[first])
        inner.enter_context(regions[second])
        outer.close()
        assert [product_dtype(name) for name in (first, second)] == ["float32", "bfloat16"]
        inner.close()
    assert product_dtypes() == ("float32", "float32")


def test_default_policies_are_apart() -> None:
    mezzo.tensorplay.set_default_policy("fp32")
    try:
        assert mezzo.torch.get_default_policy().name == "default"
        with region("torch", "mezzo", "bfloat16"), region("tensorplay", "mezzo", "bfloat16"):
            assert product_dtypes() == ("bfloat16", "float32")
    finally:
        mezzo.tensorplay.set_default_policy(None)
    mezzo.torch.set_default_policy("fp32")
    try:
        assert mezzo.tensorplay.get_default_policy().name == "default"
        with region("torch", "mezzo", "bfloat16"), region("tensorplay", "mezzo", "bfloat16"):
            assert product_dtypes() == ("float32", "bfloat16")
    finally:
        mezzo.torch.set_default_policy(None)


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "norm": lambda framework, x: framework.norm(x),
    "l1_loss": lambda framework, x: framework.nn.functional.l1_loss(x, x),
    "mse_loss": lambda framework, x: framework.nn.functional.mse_loss(x, x),
    "smooth_l1_loss": lambda framework, x: framework.nn.functional.smooth_l1_loss(x, x),
    "kl_div": lambda framework, x: framework.nn.functional.kl_div(x, x, reduction="sum"),
    "softmax": lambda framework, x: framework.softmax(x, -1),
    "layer_norm": lambda framework, x: framework.nn.functional.layer_norm(x, (4,)),
    "exp": lambda framework, x: framework.exp(x),
    "sum": lambda framework, x: x.sum(),
    "cumsum": lambda framework, x: x.cumsum(0),
    "dist": lambda framework, x: framework.dist(x, x),
    "add": lambda framework, x: x + 1,
    "product": lambda framework, x: x @ x.float().transpose(0, 1),
    "mixed cat": lambda framework, x: framework.cat([x, x.float()]),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_under_pytorchs_table_results_have_pytorchs_dtypes(function: Callable[[Any, Any], Any]) -> None:
    found = []
    for name, framework in FRAMEWORKS.items():
        x = framework.ones(3, 4).to(framework.bfloat16)
        with region(name, "mezzo", "bfloat16", policy="unified"):
            found.append(str(function(framework, x).dtype).rpartition(".")[2])
    assert found[0] == found[1]


# A net of the two frameworks: the same weights, three layers with a norm, and a penalty on its gradient.

NUMBERS = np.random.default_rng(0)
WEIGHTS = [NUMBERS.normal(0, 0.4, shape).astype(np.float32) for shape in ((16, 8), (16, 16), (1, 16))]
POINTS = NUMBERS.normal(0, 1, (32, 8)).astype(np.float32)


def gradients(name: str, low: str | None, *, penalty: bool = False) -> list[Any]:
    """Give the gradients of the three weights as arrays; without ``low`` those of float32."""
    framework = FRAMEWORKS[name]
    functional = framework.nn.functional
    weights = [framework.from_numpy(weight.copy()).requires_grad_() for weight in WEIGHTS]
    points = framework.from_numpy(POINTS.copy()).requires_grad_()
    with region(name, "mezzo", low or "bfloat16", enabled=low is not None):
        hidden = functional.linear(points, weights[0])
        # TensorPlay's softmax is differentiable twice; its layer_norm and its tanh are not, in float32 either.
        hidden = framework.softmax(hidden, -1) if penalty else framework.tanh(functional.layer_norm(hidden, (16,)))
        loss = functional.linear(functional.linear(hidden, weights[1]), weights[2]).sum()
        if penalty:
            (slope,) = framework.autograd.grad(loss, [points], create_graph=True)
            loss = ((slope.pow(2).sum(1) + 1e-6).sqrt() - 1).pow(2).sum()
    loss.backward()
    return [np.array(weight.grad.tolist()) for weight in weights]


def largest_error(found: list[Any], exact: list[Any]) -> float:
    """Give the largest difference of gradients, over the largest value of each."""
    return max(np.abs(one - other).max() / np.abs(other).max() for one, other in zip(found, exact, strict=True))


# A few roundings to 8 or 11 bits, one after the other, in both.
NEAR = {"bfloat16": 2**-5, "float16": 2**-8}


@pytest.mark.parametrize("penalty", [False, True], ids=["plain", "gradient penalty"])
@pytest.mark.parametrize("low", NEAR)
def test_gradients_are_float32s_and_pytorchs_within_rounding(low: str, penalty: bool) -> None:
    exact = gradients("torch", None, penalty=penalty)
    assert largest_error(gradients("tensorplay", None, penalty=penalty), exact) < 1e-4
    found = gradients("tensorplay", low, penalty=penalty)
    assert 0 < largest_error(found, exact) < NEAR[low]
    assert largest_error(found, gradients("torch", low, penalty=penalty)) < NEAR[low]


@pytest.mark.parametrize("inner", ["torch", "tensorplay"])
def test_a_backward_pass_in_the_others_region_is_the_same(inner: str) -> None:
    (outer,) = set(FRAMEWORKS) - {inner}
    alone = gradients(inner, "bfloat16")
    with region(outer, "mezzo", "float16"):
        assert product_dtype(outer) == "float16"
        within = gradients(inner, "bfloat16")
    assert all(np.array_equal(one, other) for one, other in zip(within, alone, strict=True))


def test_threads_of_both_compute_as_alone() -> None:
    """Each of two threads has a framework, two more have none and compute in float32; all run at the same time."""
    jobs = [("torch", "bfloat16"), ("tensorplay", "bfloat16"), ("torch", None), ("tensorplay", None)]
    alone = [gradients(*job) for job in jobs]
    wrong: list[Any] = []
    barrier = threading.Barrier(len(jobs))

    def work(job: tuple[str, str | None], exact: list[Any]) -> None:
        try:
            barrier.wait(30)
            for _ in range(20):
                found = gradients(*job)
                assert all(np.array_equal(one, other) for one, other in zip(found, exact, strict=True))
        except BaseException as error:
            wrong.append((job, error))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(jobs, alone, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert product_dtypes() == ("float32", "float32")


ORDER = """
import importlib, sys
first, second = sys.argv[1:]
importlib.import_module("mezzo." + first)
assert second not in sys.modules and "jax" not in sys.modules
importlib.import_module("mezzo." + second)
import mezzo, tensorplay, torch
for framework in (torch, tensorplay):
    region = getattr(mezzo, framework.__name__).autocast("cpu", dtype=framework.bfloat16)
    weight = framework.ones(4, 4).requires_grad_()
    with region:
        product = framework.ones(4, 4) @ weight
        product.sum().backward()
    assert product.dtype == framework.bfloat16 and weight.grad.dtype == framework.float32
    assert weight.grad.tolist() == [[4.0] * 4] * 4
print("fine")
"""


@pytest.mark.parametrize("order", [("torch", "tensorplay"), ("tensorplay", "torch")], ids=" ".join)
def test_either_may_be_imported_first_and_does_not_import_the_other(order: tuple[str, str]) -> None:
    assert run_python(ORDER, *order) == "fine"
