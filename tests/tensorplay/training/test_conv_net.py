"""A small conv net with batch norm and max-pool learns scikit-learn's digits in a lower precision as in float32."""

from __future__ import annotations

import pytest
import tensorplay as tp

from .digits import ConvNet, Recipe, train
from .learning import LOW, assert_learned_as_in_float32, assert_products_ran_low, in_region

RECIPES = {
    "SGD": Recipe(ConvNet, "SGD", (("lr", 0.03), ("momentum", 0.9)), epochs=4),
    "AdamW": Recipe(ConvNet, "AdamW", (("lr", 0.01),), epochs=4),
}
PRODUCTS = ["first", "second", "head"]


@pytest.mark.parametrize("optimizer", RECIPES)
@pytest.mark.parametrize("low", LOW)
def test_a_conv_net_learns_as_in_float32(low: str, optimizer: str) -> None:
    found = in_region(RECIPES[optimizer], low)
    assert_learned_as_in_float32(found, RECIPES[optimizer])
    assert_products_ran_low(found, PRODUCTS, low)


@pytest.mark.parametrize("low", LOW)
def test_a_conv_net_learns_under_pytorchs_table(low: str) -> None:
    found = in_region(RECIPES["SGD"], low, "unified")
    assert_learned_as_in_float32(found, RECIPES["SGD"])
    assert_products_ran_low(found, PRODUCTS, low)


@pytest.mark.parametrize("low", LOW)
def test_native_autocast_cannot_train_it(low: str) -> None:
    """The package has no max-pool in a lower precision, and its autocast does not know."""
    with pytest.raises(NotImplementedError, match="max_pool2d_with_indices"):
        train(RECIPES["SGD"], lambda: tp.autocast("cpu", dtype=LOW[low]))
