"""Public functions under the unified policy: PyTorch's dtypes and numbers, for code that is the same but for the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorplay
import torch

import mezzo.tensorplay as mt
import mezzo.torch
from tests.tensorplay.op_calls import tensor_of
from tests.tensorplay.op_runs import HALVES, distance, dtype_names, outcome
from tests.tensorplay.op_samples import integers, matrix, normal, positive, spread, unit

X, Y, Q = normal(3, 4), positive(3, 4), unit(3, 4)
IMAGE = spread(1, 2, 6, 6)
CLASSES = integers(0, 2, 1)

Function = Callable[..., Any]
FUNCTIONS: dict[str, tuple[Function, tuple[Any, ...]]] = {
    "a @ b": (lambda p, a, b: a @ b, (X, normal(4, 5))),
    "a ** 2": (lambda p, a: a**2, (Y,)),
    "2 ** a": (lambda p, a: 2**a, (Y,)),
    "a + b": (lambda p, a, b: a + b, (X, Y)),
    "a.sum()": (lambda p, a: a.sum(), (X,)),
    "a.mm(b)": (lambda p, a, b: a.mm(b), (X, normal(4, 5))),
    "a.softmax(1)": (lambda p, a: a.softmax(1), (X,)),
    "bilinear": (lambda p, *a: p.nn.functional.bilinear(*a), (X, normal(3, 5), normal(2, 4, 5))),
    "binary_cross_entropy_with_logits": (lambda p, *a: p.nn.functional.binary_cross_entropy_with_logits(*a), (X, Q)),
    "cat": (lambda p, *a: p.cat(a), (X, Y)),
    "cdist": (lambda p, *a: p.cdist(*a), (X, Y)),
    "conv2d": (lambda p, *a: p.nn.functional.conv2d(*a), (IMAGE, normal(3, 2, 3, 3), normal(3))),
    "cosine_embedding_loss": (
        lambda p, a, b: p.nn.functional.cosine_embedding_loss(a, b, p.ones(3)),
        (X, Y),
    ),
    "cosine_similarity": (lambda p, *a: p.nn.functional.cosine_similarity(*a), (X, Y)),
    "cross_entropy": (lambda p, a, c: p.nn.functional.cross_entropy(a, c), (X, CLASSES)),
    "cross_entropy with weights": (
        lambda p, a, c, w: p.nn.functional.cross_entropy(a, c, w),
        (X, CLASSES, positive(4)),
    ),
    "einsum": (lambda p, *a: p.einsum("ij,jk->ik", *a), (X, normal(4, 5))),
    "exp": (lambda p, a: p.exp(a), (X,)),
    "gelu": (lambda p, a: p.nn.functional.gelu(a), (X,)),
    "gaussian_nll_loss": (lambda p, *a: p.nn.functional.gaussian_nll_loss(*a), (X, Y, Q)),
    "grid_sample": (lambda p, *a: p.nn.functional.grid_sample(*a, align_corners=False), (IMAGE, unit(1, 3, 3, 2))),
    "huber_loss": (lambda p, *a: p.nn.functional.huber_loss(*a), (X, Y)),
    "interpolate": (lambda p, a: p.nn.functional.interpolate(a, scale_factor=2, mode="bilinear"), (IMAGE,)),
    "kl_div": (lambda p, *a: p.nn.functional.kl_div(*a, reduction="sum"), (X, Q)),
    "l1_loss": (lambda p, *a: p.nn.functional.l1_loss(*a), (X, Y)),
    "layer_norm": (lambda p, a, w, b: p.nn.functional.layer_norm(a, [4], w, b), (X, positive(4), normal(4))),
    "linalg.inv": (lambda p, a: p.linalg.inv(a), (matrix(3, 3),)),
    "linalg.multi_dot": (lambda p, *a: p.linalg.multi_dot(a), (X, normal(4, 5), normal(5, 2))),
    "linalg.vecdot": (lambda p, *a: p.linalg.vecdot(*a), (X, Y)),
    "linear": (lambda p, *a: p.nn.functional.linear(*a), (X, normal(5, 4), normal(5))),
    "log_softmax": (lambda p, a: p.log_softmax(a, 1), (X,)),
    "logsigmoid": (lambda p, a: p.nn.functional.logsigmoid(a), (X,)),
    "margin_ranking_loss": (lambda p, *a: p.nn.functional.margin_ranking_loss(*a), (X, Y, Q)),
    "matrix_power": (lambda p, a: p.matrix_power(a, 3), (matrix(3, 3),)),
    "max_pool2d": (lambda p, a: p.nn.functional.max_pool2d(a, 2), (IMAGE,)),
    "mse_loss": (lambda p, *a: p.nn.functional.mse_loss(*a), (X, Y)),
    "multilabel_soft_margin_loss": (lambda p, *a: p.nn.functional.multilabel_soft_margin_loss(*a), (X, Q)),
    "norm": (lambda p, a: p.norm(a), (X,)),
    "normalize": (lambda p, a: p.nn.functional.normalize(a), (X,)),
    "outer": (lambda p, *a: p.outer(*a), (normal(3), positive(4))),
    "pad by reflection": (lambda p, a: p.nn.functional.pad(a, (1, 1), mode="reflect"), (spread(1, 2, 6),)),
    "pairwise_distance": (lambda p, *a: p.nn.functional.pairwise_distance(*a), (X, Y)),
    "poisson_nll_loss": (lambda p, *a: p.nn.functional.poisson_nll_loss(*a), (X, Y)),
    "prelu": (lambda p, *a: p.nn.functional.prelu(*a), (X, positive(1))),
    "relu": (lambda p, a: p.relu(a), (X,)),
    "rms_norm": (lambda p, a, w: p.nn.functional.rms_norm(a, [4], w), (X, positive(4))),
    "scaled_dot_product_attention": (
        lambda p, *a: p.nn.functional.scaled_dot_product_attention(*a),
        (normal(1, 2, 3, 4), normal(1, 2, 3, 4), normal(1, 2, 3, 4)),
    ),
    "smooth_l1_loss": (lambda p, *a: p.nn.functional.smooth_l1_loss(*a), (X, Y)),
    "soft_margin_loss": (lambda p, *a: p.nn.functional.soft_margin_loss(*a), (X, Y)),
    "softplus": (lambda p, a: p.nn.functional.softplus(a), (X,)),
    "stack": (lambda p, *a: p.stack(a), (X, Y)),
    "tensordot": (lambda p, *a: p.tensordot(*a, 1), (X, normal(4, 5))),
    "triplet_margin_loss": (lambda p, *a: p.nn.functional.triplet_margin_loss(*a), (X, Y, Q)),
    "where": (lambda p, a, b: p.where(a > 0, a, b), (X, Y)),
}

EXCEPTIONS = {
    "max_pool2d": "there is no low kernel here, so it runs in float32",
}
"""Functions of which some call has another dtype, and why."""


def results(name: str, package: Any, region: Any, dtypes: list[str]) -> Any:
    function, arrays = FUNCTIONS[name]
    tensors = [tensor_of(array) if package is tensorplay else torch.from_numpy(np.array(array)) for array in arrays]
    left = iter(dtypes + dtypes[-1:] * len(tensors))
    made = [tensor.to(getattr(package, next(left))) if tensor.is_floating_point() else tensor for tensor in tensors]
    with region:
        return function(package, *made)


def both(name: str, half: str, dtypes: list[str]) -> tuple[Any, Any]:
    ours = mt.autocast("cpu", dtype=getattr(tensorplay, half), policy="unified")
    theirs = mezzo.torch.autocast("cpu", dtype=getattr(torch, half), policy="unified")
    return outcome(results(name, tensorplay, ours, dtypes))[0], results(name, torch, theirs, dtypes)


def mixes(half: str) -> list[list[str]]:
    return [["float32"], [half], [half, "float32"], ["float32", half]]


@pytest.mark.parametrize("half", [str(half).split(".")[-1] for half in HALVES])
@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - {*EXCEPTIONS}))
def test_a_public_function_gives_pytorchs_dtype_and_numbers(name: str, half: str) -> None:
    for dtypes in mixes(half):
        ours, theirs = both(name, half, dtypes)
        assert dtype_names([ours]) == dtype_names([theirs]), dtypes
        # A few roundings of the low dtype: functions written in Python round between their steps.
        assert distance(ours, theirs) <= 16 * (2.0**-8 if half == "bfloat16" else 2.0**-11), dtypes


@pytest.mark.parametrize("name", sorted(EXCEPTIONS))
def test_the_exceptions_still_are_some(name: str) -> None:
    pairs = [both(name, "bfloat16", dtypes) for dtypes in mixes("bfloat16")]
    assert any(dtype_names([ours]) != dtype_names([theirs]) for ours, theirs in pairs), EXCEPTIONS[name]
    for ours, theirs in pairs:
        assert distance(ours, theirs) <= 16 * 2.0**-8
