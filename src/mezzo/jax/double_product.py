"""A product taken in double and rounded to float32, on a device that may have no float64: the rule's arithmetic, exact."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["times_in_double"]


def times_in_double(scale: jax.Array, factor: float) -> jax.Array:
    """Multiply a float32 number by a factor as double does, and round the product to float32 once.

    Args:
        scale: A float32 array of positive numbers.
        factor: A positive number.

    Returns:
        What `mezzo.LossScaling` computes, bit for bit; 0 or less digits below the normal numbers of float32.
    """
    if float(np.float32(factor)) == factor:
        # The product of two float32 numbers is exact in double, so that rounding it once gives the same.
        return scale * np.float32(factor)
    # JAX has no float64 by default, so the product is taken of integers. Both have their leading 1 in front: 24 bits of the
    # scale, 53 of the factor.
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    fraction, exponent = math.frexp(factor)
    limbs = _product((bits & 0x7FFFFF) | 0x800000, int(fraction * 2**53))
    # 76 or 77 bits, in limbs of 16. Of 77 the upper 24 are kept; the next 29 are what double has beyond float32.
    long = limbs[4] >> 12
    shift = 1 - long
    high, middle = limbs[4] << 16 | limbs[3], limbs[2] << 16 | limbs[1]
    kept, double = high >> 5 - shift, (high << 24 + shift | middle >> 8 - shift) & 0x1FFFFFFF
    double += _rounds_up((middle << 16 | limbs[0]) << shift & 0xFFFFFF, 24, double)
    kept += _rounds_up(double, 29, kept)
    # Adding, not setting: a carry out of the 24 bits raises the exponent, up to Inf.
    power = (bits >> 23).astype(jnp.int32) + exponent + long.astype(jnp.int32) - 1
    raised = (jnp.clip(power, 1, 255).astype(jnp.uint32) << 23) + (kept - 0x800000)
    raised = jnp.where(power >= 255, jnp.uint32(0x7F800000), raised)
    product = lax.bitcast_convert_type(raised, jnp.float32)
    # Below the normal numbers the floor is what counts, whatever the product.
    normal = (scale >= np.float32(2.0**-126)) & jnp.isfinite(scale)
    return jnp.where(normal, jnp.where(power < 1, 0.0, product), scale * np.float32(factor))


def _product(left: jax.Array, right: int) -> list[jax.Array]:
    columns = [jnp.zeros_like(left) for _ in range(6)]
    for place in range(4):
        for above, part in enumerate((left & 0xFFFF, left >> 16)):
            term = part * np.uint32(right >> 16 * place & 0xFFFF)
            columns[place + above] += term & 0xFFFF
            columns[place + above + 1] += term >> 16
    for place in range(5):
        columns[place + 1] += columns[place] >> 16
    return [column & 0xFFFF for column in columns]


def _rounds_up(rest: jax.Array, width: int, kept: jax.Array) -> jax.Array:
    half = 1 << (width - 1)
    return ((rest > half) | ((rest == half) & (kept & 1 == 1))).astype(jnp.uint32)
