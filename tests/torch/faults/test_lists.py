"""Section C, second part: op lists that differ by device, and functions that are on none.

The default policy keeps each device's own list, since programs that work are to give the same numbers. Mezzo's answers
are the policy ``"unified"``, one list for all devices, and registration for functions that are no ops.
"""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from .amps import Amp, assert_near, low_dtypes

LARGE = torch.full((4, 4), 4e4)

# In float16 each of these is infinite on the CPU; the largest half is 65504.
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "sum of rows": lambda x: x.sum(1),
    "norm": torch.norm,
    "vector_norm": torch.linalg.vector_norm,
    "matrix_norm": torch.linalg.matrix_norm,
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x[:2].cumprod(0),
    "dist": lambda x: torch.dist(x, -x),
    "pow": lambda x: x**2,
}


@pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS)
def test_c2_reductions_do_not_overflow_on_the_cpu(amp: Amp, reduce: Callable[[Tensor], Tensor]) -> None:
    """C2, top 15 no. 8: under the policy "unified" the CPU reduces in float32, as CUDA does."""
    x = LARGE.half()
    with amp.region(torch.float16, policy="unified"):
        result = reduce(x)
    assert_near(result, reduce(x.double()), torch.float32)


@pytest.mark.parametrize("equation", ["ij->", "ij->i"])
def test_c2_an_einsum_that_only_sums_does_not_overflow(amp: Amp, equation: str) -> None:
    """C2: the sum inside of an einsum follows an edited list, and its products stay as they are.

    Not so under "unified": CUDA's list, and so that one, has every einsum in the lower precision.
    """
    from mezzo import builtin_policy

    policy, x = builtin_policy("default").override({"sum": "fp32"}), LARGE.half()
    with amp.region(torch.float16, policy=policy):
        result = torch.einsum(equation, x)
        product = torch.einsum("ij,jk->ik", x / 4e4, x / 4e4)
    assert_near(result, torch.einsum(equation, x.double()), torch.float32)
    assert_near(product, torch.full((4, 4), 4.0), torch.float16)


@low_dtypes
def test_c2_a_loss_made_of_a_sum_is_finite(amp: Amp, low: torch.dtype) -> None:
    """C2: a large sum over what a layer of the region gives, and its gradient, are right to the layer's precision."""
    layer, x = nn.Linear(8, 8), torch.randn(64, 8)
    with torch.no_grad():
        layer.bias.fill_(2000.0)
    reference = layer(x).sum()
    wanted = torch.autograd.grad(reference, [layer.bias])[0]
    with amp.region(low, policy="unified"):
        loss = layer(x).sum()
    loss.backward()
    assert_near(loss, reference, torch.float32, computed=low)
    assert_near(layer.bias.grad, wanted, torch.float32)


def foreign_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Stand for an attention kernel from elsewhere: it checks dtypes before any op that autocast could see."""
    if not query.dtype == key.dtype == value.dtype or query.dtype is torch.float32:
        msg = f"attention takes one lower-precision dtype, got {query.dtype}, {key.dtype} and {value.dtype}"
        raise TypeError(msg)
    return (query @ key.mT / 2).softmax(-1) @ value


@low_dtypes
def test_c5_foreign_attention_gets_one_dtype(amp: Amp, low: torch.dtype) -> None:
    """C5, top 15 no. 8: a foreign function that wants one dtype is registered; PyTorch has no API for it."""
    library = types.SimpleNamespace(attention=foreign_attention)
    norm, project, x = nn.LayerNorm(4), nn.Linear(4, 4), torch.randn(3, 4)
    with amp.register_function(library, "attention", "lower_precision_fp"), amp.region(low, policy="unified"):
        query, value = norm(x), project(x)
        assert (query.dtype, value.dtype) == (torch.float32, low)
        result = library.attention(query, query, value)
    exact = norm(x).double()
    reference = (exact @ exact.mT / 2).softmax(-1) @ project(x).double()
    assert_near(result, reference, low)
