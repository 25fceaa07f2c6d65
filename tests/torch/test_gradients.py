"""Gradients through casts: recorded above autograd, in the dtype of what was cast, and PyTorch's to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

import mezzo.torch
from mezzo.torch.kernels import serve_all

LOW = (torch.bfloat16, torch.float16)
low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)
# Relative to the largest element of the reference; half an epsilon per rounding, and fewer than ten of them.
TOLERANCE = {torch.bfloat16: 2**-5, torch.float16: 2**-8}

Region = Callable[[torch.dtype], AbstractContextManager[Any]]


def served_by_mezzo(low: torch.dtype) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(serve_all("cpu"))
    stack.enter_context(mezzo.torch.autocast("cpu", dtype=low))
    return stack


REGIONS: dict[str, Region] = {
    "torch": lambda low: mezzo.torch.autocast("cpu", dtype=low, policy="torch"),
    "served": served_by_mezzo,
    "unified": lambda low: mezzo.torch.autocast("cpu", dtype=low, policy="unified"),
    "fp32": lambda low: mezzo.torch.autocast("cpu", dtype=low, policy="fp32"),
}
every_region = pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
pytorchs_rules = pytest.mark.parametrize("region", [REGIONS["torch"], REGIONS["served"]], ids=["torch", "served"])


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def network(weight: Tensor, bias: Tensor, head: Tensor, x: Tensor) -> Tensor:
    hidden = torch.nn.functional.linear(x, weight, bias).relu()
    return (hidden @ head).softmax(0).pow(2).sum() + torch.nn.functional.smooth_l1_loss(hidden, x)


def parameters() -> list[Tensor]:
    shapes = ((8, 8), (8,), (8,))
    return [(random(*shape, seed=seed) / 4).requires_grad_() for seed, shape in enumerate(shapes)]


def gradients(region: AbstractContextManager[Any], *, inside: bool) -> tuple[Tensor, ...]:
    leaves, x = parameters(), random(5, 8, seed=4)
    with region:
        loss = network(*leaves, x)
        if inside:
            return torch.autograd.grad(loss, leaves)
    return torch.autograd.grad(loss, leaves)


def recorded(tensor: Tensor) -> list[str]:
    """Name the nodes of a tensor's graph, depth first."""
    names, queue = [], [tensor.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None:
            names.append(node.name())
            queue += [parent for parent, _ in node.next_functions]
    return names


@low_dtypes
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@every_region
def test_gradients_of_float32_parameters_are_float32_and_near_the_reference(region, inside, low):
    reference = gradients(mezzo.torch.autocast("cpu", enabled=False), inside=inside)
    for found, expected in zip(gradients(region(low), inside=inside), reference, strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() <= TOLERANCE[low] * expected.abs().max()


@low_dtypes
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytorchs_rules
def test_gradients_under_pytorchs_rules_are_pytorchs_to_the_last_bit(region, inside, low):
    expected = gradients(torch.autocast("cpu", dtype=low), inside=inside)
    found = gradients(region(low), inside=inside)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    plain = gradients(torch.autocast("cpu", enabled=False), inside=inside)
    assert not all(torch.equal(one, two) for one, two in zip(found, plain, strict=True))


@low_dtypes
@pytorchs_rules
def test_the_graph_under_pytorchs_rules_is_pytorchs(region, low):
    with torch.autocast("cpu", dtype=low):
        expected = recorded(network(*parameters(), random(5, 8, seed=4)))
    with region(low):
        found = recorded(network(*parameters(), random(5, 8, seed=4)))
    assert found == expected
    assert found.count("ToCopyBackward0") >= 3


@low_dtypes
def test_the_casts_of_an_op_that_only_the_policy_lists_are_recorded_and_what_is_saved_is_low(low):
    weight, vector = random(4, 4, seed=1).requires_grad_(), random(4, seed=2).requires_grad_()
    with mezzo.torch.autocast("cpu", dtype=low, policy="unified"):
        product = torch.mv(weight, vector)
    assert product.dtype == low
    assert [parent.name() for parent, _ in product.grad_fn.next_functions] == ["ToCopyBackward0"] * 2
    assert product.grad_fn._saved_vec.dtype == low
    product.sum().backward()
    assert weight.grad.dtype == vector.grad.dtype == torch.float32
    assert torch.equal(weight.grad, vector.detach().to(low).float().expand(4, 4))


@low_dtypes
def test_a_gradient_comes_back_in_the_dtype_of_what_was_cast(low):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    leaves = [random(4, 4, seed=1).to(dtype).requires_grad_() for dtype in dtypes]
    with mezzo.torch.autocast("cpu", dtype=low, policy="unified"):
        torch.addr(torch.mm(leaves[0], leaves[1]), leaves[2][0], leaves[2][1]).sum().backward()
    assert tuple(leaf.grad.dtype for leaf in leaves) == dtypes


def second_derivative(region: AbstractContextManager[Any], op: Callable[[Tensor], Tensor]) -> Tensor:
    weight = random(4, 4, seed=1).requires_grad_()
    with region:
        (first,) = torch.autograd.grad(op(weight).float().pow(2).sum(), weight, create_graph=True)
        assert first.dtype == torch.float32
        (second,) = torch.autograd.grad(first.pow(2).sum(), weight)
    return second


@low_dtypes
@every_region
@pytest.mark.parametrize(
    "op",
    [lambda w: torch.mm(w, w), lambda w: torch.mv(w, w[0]), lambda w: w.softmax(-1)],
    ids=["mm", "mv", "softmax"],
)
def test_second_derivatives_are_near_the_reference(region, op, low):
    reference = second_derivative(mezzo.torch.autocast("cpu", enabled=False), op)
    found = second_derivative(region(low), op)
    assert found.dtype == torch.float32
    assert (found - reference).abs().max() <= TOLERANCE[low] * reference.abs().max()


@low_dtypes
@pytorchs_rules
def test_second_derivatives_under_pytorchs_rules_are_pytorchs_to_the_last_bit(region, low):
    expected = second_derivative(torch.autocast("cpu", dtype=low), lambda w: torch.mm(w, w))
    assert torch.equal(second_derivative(region(low), lambda w: torch.mm(w, w)), expected)
