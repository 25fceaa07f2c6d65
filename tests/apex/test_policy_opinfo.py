"""The policy "apex-o1" over PyTorch's op database: nothing changes the dtype of its result but what Apex lists."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mezzo.torch import autocast

from .o1_lists import LISTS

SAMPLES = 4

BUILT_ON_LISTED = {
    "masked.prod": "prod",
    "nn.functional.gaussian_nll_loss": "log and pow",
    "nn.functional.linear_cross_entropy": "linear and cross_entropy",
    "nn.functional.multi_head_attention_forward": "linear",
    "nn.functional.triplet_margin_with_distance_loss": "pairwise_distance and sum",
    "nn.functional.upsample_bilinear": "interpolate",
    "nn.functional.upsample_nearest": "interpolate",
}
"""Functions that PyTorch writes in Python with listed ones, as Apex met them too; and with which."""

SAME_OP = {
    "linalg.matrix_norm": "norm with p='nuc'",
    "linalg.vector_norm": "norm",
    "nn.functional.prelu": "torch.prelu",
    "group_norm": "F.group_norm",
    "layer_norm": "F.layer_norm",
    "__rmatmul__": "__matmul__",
    "__rdiv__": "reciprocal",
    "__rpow__": "__rpow__",
}
"""Functions that are the same op as a listed one; and which."""


def listed() -> set[str]:
    """Give the listed names as the database spells them."""
    prefix = {"F": "nn.functional.", "torch": "", "Tensor": "", "RNN": ""}
    names = {f"{prefix[home]}{name}" for (home, _), names in LISTS.items() for name in names}
    return names | {"softmax", "log_softmax"}  # the op of torch is that of F


def functions() -> Iterator[tuple[str, Any, Callable[..., Any]]]:
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        yield info.name, info, info.op
        for alias in info.aliases:
            yield alias.name, info, alias.op


def dtypes(value: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def changes(info: Any, function: Callable[..., Any], given: torch.dtype) -> bool:
    """Say whether a region changes the dtype of a function's result; a call that fails without one does not count."""
    torch.default_generator.manual_seed(0)
    # Not `info.sample_inputs`: for each op that one walks the stack, which is deep here, in search of a unittest.
    samples = info.sample_inputs_func(info, "cpu", given, requires_grad=False)
    for sample in itertools.islice(samples, SAMPLES):
        try:
            expected = dtypes(function(sample.input, *sample.args, **sample.kwargs))
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            continue
        with autocast("cpu", dtype=torch.bfloat16, policy="apex-o1"):
            found = dtypes(function(sample.input, *sample.args, **sample.kwargs))
        if found != expected:
            return True
    return False


LEFT_OUT = {
    "jiterator": "needs a GPU",
    "nn.functional.binary_cross_entropy": "is banned in lower precision",
    "pca_lowrank": "is made of products, which are low, and of decompositions, for which there is no low kernel",
    "svd_lowrank": "the same",
}
"""By how their names begin, what is not called; and why."""


@pytest.mark.slow
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_only_what_is_listed_changes_a_dtype(given: torch.dtype) -> None:
    found = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated functions are called, too
        for name, info, function in functions():
            if function is None or name.startswith(tuple(LEFT_OUT)) or given not in info.supported_dtypes("cpu"):
                continue
            if changes(info, function, given):
                found.add(name)
    assert found <= listed() | set(BUILT_ON_LISTED) | set(SAME_OP)
    # The float32 list changes low inputs, the other one float32.
    assert len(found) > (60 if given is torch.bfloat16 else 20)
