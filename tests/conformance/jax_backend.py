"""JAX on the CPU as a backend of the conformance tests.

`mezzo.jax.autocast` is a transformation and no state: a region here is a list of settings, and each op is transformed once
for every region that is open, by the innermost first. So what the tests say of nested regions is said of nested
transformations.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import mezzo.jax
from mezzo import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax import Array

    from mezzo import LossScaling, ScaleState
    from mezzo.builtin import PolicyLike

__all__ = ["JaxBackend"]

INF, NAN = float("inf"), float("nan")
SLOPES = {Verdict.FINITE: [1.0, 1.0, 1.0], Verdict.INF: [1.0, INF, NAN], Verdict.NAN: [1.0, NAN, 1.0]}
"""The gradients before scaling that earn each verdict."""


class OpenRegions(threading.local):
    """The settings of the regions that a thread has open, the innermost last."""

    def __init__(self) -> None:
        self.settings: list[dict[str, Any]] = []


class JaxRegion:
    """Settings for the ops that run while it is open."""

    def __init__(self, open_regions: OpenRegions, settings: dict[str, Any]) -> None:
        self.open_regions = open_regions
        self.settings = settings

    def __enter__(self) -> None:
        self.open_regions.settings.append(self.settings)

    def __exit__(self, *_: object) -> None:
        self.open_regions.settings.pop()

    def __call__(self, function: Callable[..., Any], /) -> Callable[..., Any]:
        @functools.wraps(function)
        def in_region(*arguments: Any) -> Any:
            with self:
                return function(*arguments)

        return in_region


class JaxBackend:
    """`mezzo.jax` on the CPU."""

    name = "jax"
    low_dtypes = ("bfloat16", "float16")
    policies = ("default", "unified", "fp32")

    def __init__(self) -> None:
        self.open_regions = OpenRegions()

    def region(self, dtype: str | None = None, *, enabled: bool = True, policy: PolicyLike | None = None) -> JaxRegion:
        # The tests ask for the dtype in which an op came out, which the default gives back as it was traced.
        settings = {"enabled": enabled, "policy": policy, "outputs": "flow"}
        return JaxRegion(self.open_regions, settings if dtype is None else {**settings, "dtype": dtype})

    def array(self, values: Sequence[Any], dtype: str) -> Array:
        with width_of(np.dtype(dtype)):
            return jnp.asarray(values, dtype)

    def numbers(self, array: Array) -> list[float]:
        return np.asarray(array).astype(np.float64).flatten().tolist()

    def dtype_name(self, array: Array) -> str:
        return array.dtype.name

    def matmul(self, left: Array, right: Array) -> Array:
        return self.run(jnp.matmul, left, right)

    def softmax(self, array: Array) -> Array:
        return self.run(jax.nn.softmax, array)

    def sum(self, array: Array) -> Array:
        return self.run(jnp.sum, array)

    def relu(self, array: Array) -> Array:
        return self.run(jax.nn.relu, array)

    def cross(self, left: Array, right: Array) -> Array:
        return self.run(jnp.cross, left, right)

    def gradient(self, function: Callable[[Array], Array], weight: Array) -> Array:
        return self.run(jax.grad(function), weight)

    def run(self, op: Callable[..., Array], *arrays: Array) -> Array:
        """Run an op, transformed for every open region."""
        for settings in reversed(self.open_regions.settings):
            op = mezzo.jax.autocast(op, **settings)
        with width_of(*(array.dtype for array in arrays)):
            return op(*arrays)

    def is_enabled(self) -> bool:
        msg = "mezzo.jax.autocast transforms a function; there is no state of the thread that one could ask for"
        raise NotImplementedError(msg)

    def scales(
        self, numbers: LossScaling, verdicts: Sequence[Verdict], *, start: ScaleState | None = None
    ) -> list[tuple[float, int]]:
        scaler = mezzo.jax.GradScaler.create(numbers)
        if start is not None:
            checkpoint = {"scale": jnp.float32(start.scale), "growth_tracker": jnp.int32(start.growth_tracker)}
            scaler = dataclasses.replace(scaler, **checkpoint)
        reached = []
        for verdict in verdicts:
            scaler = iteration(scaler, jnp.asarray(SLOPES[verdict], jnp.float32))
            reached.append((float(scaler.scale), int(scaler.growth_tracker)))
        return reached


@jax.jit
def iteration(scaler: mezzo.jax.GradScaler, slopes: Array) -> mezzo.jax.GradScaler:
    """Differentiate a loss with these slopes, and move the scale."""
    _, _, check = scaler.value_and_grad(lambda weight: (weight * slopes).sum())(jnp.ones(3))
    return scaler.update(check)


def width_of(*dtypes: np.dtype[Any]) -> AbstractContextManager[Any]:
    """Allow 64 bits, in this thread, where a dtype has them; JAX would take half of them silently."""
    wide = any(dtype.itemsize == 8 for dtype in dtypes)
    return jax.enable_x64(True) if wide else nullcontext()
