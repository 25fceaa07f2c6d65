"""The nets that TensorPlay trains: three layers, without layer norms and with them, written without a word on precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorplay
from tensorplay import nn

from mezzo.demo.arrays import CLASSES, SIDE

if TYPE_CHECKING:
    from collections.abc import Mapping

WIDTH = 512
NORMS: Mapping[str, bool] = {"plain net": False, "norm net": True}
"""Name of a net: whether a layer norm follows each hidden layer."""


def build(name: str, seed: int) -> Any:
    """Build a net with weights that depend on `seed` only.

    Args:
        name: A key of `NORMS`.
        seed: Seeds the initial weights; the global random state is left as it was.

    Returns:
        A `tensorplay.nn.Module` that maps images (samples, 64) to logits (samples, 10).

    Example:
        >>> build("norm net", seed=0)(tensorplay.zeros(4, 64)).shape
        tensorplay.Size(4, 10)
    """
    with tensorplay.fork_rng(devices=[]):
        tensorplay.manual_seed(seed)
        layers = [*_hidden(SIDE * SIDE, norm=NORMS[name]), *_hidden(WIDTH, norm=NORMS[name])]
        return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def _hidden(inputs: int, *, norm: bool) -> list[Any]:
    return [nn.Linear(inputs, WIDTH), *([nn.LayerNorm(WIDTH)] if norm else []), nn.ReLU()]
