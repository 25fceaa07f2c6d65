"""What the tests of training share: the float32 run that a net is compared with, and a run in a region."""

from __future__ import annotations

from functools import cache
from typing import Any

import tensorplay as tp

import mezzo.tensorplay

from .digits import Recipe, Trained, train

LOW = {"bfloat16": tp.bfloat16, "float16": tp.float16}
NEAR = 0.01  # of the accuracy: six of the 597 digits that are not trained on


@cache
def in_float32(recipe: Recipe) -> Trained:
    """Train without autocast, once for all tests of a process."""
    return train(recipe, lambda: tp.autocast("cpu", enabled=False))


@cache
def in_region(recipe: Recipe, low: str, policy: str | None = None) -> Trained:
    """Train in mezzo's regions, once for all tests of a process; float16 has a scaler."""
    scaler: Any = mezzo.tensorplay.GradScaler("cpu") if low == "float16" else None
    return train(recipe, lambda: mezzo.tensorplay.autocast("cpu", dtype=LOW[low], policy=policy), scaler)


def assert_learned_as_in_float32(found: Trained, recipe: Recipe) -> None:
    exact = in_float32(recipe)
    assert exact.accuracy >= 0.95
    assert abs(found.accuracy - exact.accuracy) <= NEAR


def assert_products_ran_low(found: Trained, products: list[str], low: str) -> None:
    assert {name: found.dtypes[name] for name in products} == dict.fromkeys(products, LOW[low])
