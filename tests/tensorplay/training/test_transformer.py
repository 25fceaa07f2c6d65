"""A small transformer learns scikit-learn's digits in a lower precision as well as in float32."""

from __future__ import annotations

import pytest
import tensorplay as tp

from .digits import Recipe, Transformer
from .learning import LOW, assert_learned_as_in_float32, assert_products_ran_low, in_float32, in_region

RECIPES = {
    "SGD": Recipe(Transformer, "SGD", (("lr", 0.05), ("momentum", 0.9)), epochs=3),
    "AdamW": Recipe(Transformer, "AdamW", (("lr", 0.005),), epochs=3),
}
PRODUCTS = ["embed", "layer.self_attn", "layer.linear1", "layer.linear2", "head"]
NORMS = ["layer.norm1", "layer.norm2", "norm"]


@pytest.mark.parametrize("optimizer", RECIPES)
@pytest.mark.parametrize("low", LOW)
def test_a_transformer_learns_as_in_float32(low: str, optimizer: str) -> None:
    found = in_region(RECIPES[optimizer], low)
    assert_learned_as_in_float32(found, RECIPES[optimizer])
    assert_products_ran_low(found, PRODUCTS, low)


@pytest.mark.parametrize("low", LOW)
def test_a_transformer_learns_under_pytorchs_table(low: str) -> None:
    found = in_region(RECIPES["AdamW"], low, "unified")
    assert_learned_as_in_float32(found, RECIPES["AdamW"])
    assert_products_ran_low(found, PRODUCTS, low)
    assert {found.dtypes[name] == tp.float32 for name in NORMS} == {True}


def test_the_scale_stays_useful() -> None:
    """The gradients of such a net fit float16 at the first scale or a little below."""
    scales = in_region(RECIPES["SGD"], "float16").scales
    assert len(scales) == 60
    assert scales[-1] >= 2.0**10


def test_in_float32_nothing_ran_low() -> None:
    """The comparison is with a run that no region touched."""
    assert {dtype == tp.float32 for dtype in in_float32(RECIPES["SGD"]).dtypes.values()} == {True}
