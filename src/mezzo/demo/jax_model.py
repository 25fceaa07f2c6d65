"""The net that JAX trains: a small transformer in Flax, written in float32 and without a word on precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import linen

from mezzo.demo.arrays import CLASSES, SIDE

if TYPE_CHECKING:
    import jax


class RowTransformer(linen.Module):
    """A transformer encoder that reads an image as a sequence of eight rows of eight pixels.

    Half as wide as PyTorch's, so that compiling it three times and training it take half a minute.
    """

    width: int = 96
    layers: int = 2

    @linen.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Map images (samples, 8, 8) to logits (samples, 10)."""
        rows = linen.Dense(self.width)(images)
        rows += self.param("position", linen.initializers.normal(0.02), (SIDE, self.width))
        for _ in range(self.layers):
            rows += linen.MultiHeadDotProductAttention(num_heads=4)(linen.LayerNorm()(rows))
            hidden = linen.relu(linen.Dense(4 * self.width)(linen.LayerNorm()(rows)))
            rows += linen.Dense(self.width)(hidden)
        return linen.Dense(CLASSES)(linen.LayerNorm()(rows).reshape(len(images), -1))
