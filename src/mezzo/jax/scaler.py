"""`GradScaler`: loss scaling as a value that goes through a jitted training step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mezzo.errors import ScalingError, near
from mezzo.jax.double_product import times_in_double
from mezzo.jax.flax_states import register_with_flax
from mezzo.jax.grad_check import CheckLike, GradCheck, finite_in, is_inexact
from mezzo.jax.scopes import disabled
from mezzo.scaling import LossScaling, ScaleState

__all__ = ["GradScaler"]

_MOST = 2**31 - 2
"""The highest count that can still be followed by one more in int32."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["scale", "growth_tracker", "nan_backoffs", "skipped"],
    meta_fields=["scaling", "enabled"],
)
@dataclass(frozen=True, eq=False)
class GradScaler:
    """Loss scaling for float16: an immutable pytree, made with `create`.

    The loss is multiplied by ``scale`` before it is differentiated, so that small gradients survive float16; gradients
    are divided by it; if one of them is Inf or NaN the step is left out and the scale lowered. The scale moves as
    `mezzo.LossScaling` says, to the bit. bfloat16 has the range of float32 and needs no scaler.

    All of it happens on the device: nothing is read by the host, and a whole run is one compilation. It works under all
    transformations of JAX and may be donated. Being a value, it may be shared by threads.

    Attributes:
        scale: float32 of no dimension: what the next loss is multiplied by.
        growth_tracker: int32 of no dimension: how many finite iterations there were since the scale last moved.
        nan_backoffs: int32 of no dimension: how many times in a row the scale was backed off for NaN.
        skipped: int32 of no dimension: how many iterations were not finite in all.
        scaling: The numbers of the rule; static, part of what `jax.jit` compiles for.
        enabled: If False the scaler does nothing, at no cost: no equation is added, and all steps are taken for finite.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from mezzo.jax import apply_if
        >>> def loss_fn(weight, x):
        ...     return ((x @ weight.astype(jnp.float16)) ** 2).mean()
        >>> @jax.jit
        ... def train_step(weight, scaler, x):
        ...     loss, grads, check = scaler.value_and_grad(loss_fn)(weight, x)
        ...     weight = apply_if(check, lambda weight: weight - 0.1 * grads, weight)
        ...     return weight, scaler.update(check), loss
        >>> weight, scaler = jnp.ones(4), GradScaler.create(init_scale=2.0**10)
        >>> for factor in (1.0, jnp.inf):
        ...     weight, scaler, loss = train_step(weight, scaler, jnp.full((2, 4), factor, jnp.float16))
        ...     print(weight[0], scaler.scale, scaler.skipped)
        0.19999999 1024.0 0
        0.19999999 512.0 1
    """

    scale: jax.Array
    growth_tracker: jax.Array
    nan_backoffs: jax.Array
    skipped: jax.Array
    scaling: LossScaling
    enabled: bool = True

    @classmethod
    def create(cls, scaling: LossScaling | None = None, *, enabled: bool = True, **numbers: Any) -> GradScaler:
        """Make a scaler that has seen nothing yet.

        Args:
            scaling: The numbers of the rule; None takes the defaults.
            enabled: Whether to scale at all.
            **numbers: Instead of ``scaling``, any of the numbers of `mezzo.LossScaling` by name.

        Returns:
            A scaler whose leaves are arrays: the first step compiles for all others.

        Raises:
            ScalingError: A number is not allowed or has a name that no number has, or both forms were used.

        Example:
            >>> GradScaler.create(init_scale=1024.0, max_scale=2.0**24).scale
            Array(1024., dtype=float32)
        """
        if scaling is not None and numbers:
            msg = f"GradScaler.create got scaling and also {', '.join(numbers)}; put all numbers into one of the two."
            raise ScalingError(msg)
        rule = LossScaling(**_known(numbers)) if scaling is None else scaling
        if not isinstance(rule, LossScaling):
            msg = f"scaling must be a mezzo.LossScaling or None, not {rule!r}; or pass numbers by name: init_scale=1024.0."
            raise ScalingError(msg)
        register_with_flax(cls)
        return cls(*_leaves(rule.start()), _count(0), rule, bool(enabled))

    def state(self) -> ScaleState:
        """Read what changes in a run as plain Python numbers, for a checkpoint.

        The host waits for the device, so not inside of `jax.jit`. ``skipped``, which does not move the scale, is left out.

        Returns:
            A value that `with_state` takes, and `mezzo.LossScaling.next` too.

        Example:
            >>> GradScaler.create(init_scale=1024.0).state()
            ScaleState(scale=1024.0, growth_tracker=0, nan_backoffs=0)
        """
        return ScaleState(float(self.scale), int(self.growth_tracker), int(self.nan_backoffs))

    def with_state(self, state: ScaleState) -> GradScaler:
        """Go on from a checkpoint.

        Args:
            state: What `state` gave, in this run or under another framework.

        Returns:
            A scaler with the same numbers and ``skipped``. A step compiled for the old one takes it as it is.

        Raises:
            ScalingError: The scale is not finite, or so low (below 2**-126) that its inverse would not be.

        Example:
            >>> from mezzo import ScaleState
            >>> scaler = GradScaler.create().with_state(ScaleState(512.0, growth_tracker=7))
            >>> scaler.scale, int(scaler.growth_tracker)
            (Array(512., dtype=float32), 7)
        """
        if not isinstance(state, ScaleState):
            msg = (
                f"with_state takes a mezzo.ScaleState, not {type(state).__name__}; of saved numbers ScaleState(**them)."
            )
            raise ScalingError(msg)
        if not 2.0**-126 <= state.scale < math.inf:
            msg = (
                f"The state has scale {state.scale!r}, with which no gradient survives: the scale of the run that saved it "
                "has collapsed, or is no number. Put one such as 65536.0 in its place."
            )
            raise ScalingError(msg)
        scale, tracker, nans = _leaves(state)
        return replace(self, scale=scale, growth_tracker=tracker, nan_backoffs=nans)

    def scale_loss(self, loss: Any) -> Any:
        """Multiply a loss by the scale, in float32 or wider.

        Args:
            loss: An array of a float dtype, of any shape.

        Returns:
            float32, also for a loss in float16, whose product could be more than float16 holds; float64 stays float64. The
            loss itself, if the scaler is disabled.

        Raises:
            ScalingError: The loss is not of a float dtype.

        Example:
            >>> import jax.numpy as jnp
            >>> GradScaler.create(init_scale=1024.0).scale_loss(jnp.float16(100.0))
            Array(102400., dtype=float32)
        """
        if not self.enabled:
            return loss
        dtype = _loss_dtype(loss)
        with disabled():
            wide = jnp.asarray(loss).astype(_wide(dtype))
            return wide * self.scale.astype(wide.dtype)

    def unscale(self, grads: Any) -> Any:
        """Divide gradients by the scale, in float32 or wider.

        It is the scale of now, so unscale before `update`.

        Args:
            grads: A pytree of gradients of a loss that `scale_loss` gave.

        Returns:
            The same tree. Floats narrower than float32 come back as float32; float64 and complex dtypes stay. Integers,
            float0 and what is no array are left alone. All is left alone, if the scaler is disabled.

        Example:
            >>> import jax.numpy as jnp
            >>> GradScaler.create(init_scale=1024.0).unscale({"weight": jnp.float16([1.0, 2.0])})
            {'weight': Array([0.00097656, 0.00195312], dtype=float32)}
        """
        if not self.enabled:
            return grads
        with disabled():
            return jax.tree.map(self._unscaled, grads)

    def value_and_grad(
        self,
        fn: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,  # noqa: FBT001, FBT002 - the signature of jax.value_and_grad
        *,
        allow_int: bool = False,
        axis_name: Hashable | None = None,
    ) -> Callable[..., tuple[Any, Any, GradCheck]]:
        """Differentiate a loss function with scaling: `jax.value_and_grad` that also says whether all is finite.

        Args:
            fn: The loss function, such as ``mezzo.jax.autocast(loss_fn, "float16")``. It returns a real scalar.
            argnums: Which positional arguments to differentiate for: one, or a sequence.
            has_aux: Whether ``fn`` returns a pair of the loss and anything, which is not looked at.
            allow_int: Whether these arguments may have integers; their gradients are float0.
            axis_name: Mapped axes whose members agree on the verdict, as in `GradCheck.of`. Gradients are not averaged.

        Returns:
            A function of the same arguments. It gives ``(value, grads, check)``: what ``fn`` returned, the loss unscaled;
            the gradients, as `unscale` gives them; and their `GradCheck`.

        Raises:
            ScalingError: When it is called: the loss is no scalar, or not real, or ``fn`` gave no pair.

        Example:
            >>> import jax.numpy as jnp
            >>> scaler = GradScaler.create()
            >>> value, grads, check = scaler.value_and_grad(lambda w: (w**2).sum())(jnp.array([1.0, 2.0]))
            >>> value, grads, bool(check.finite)
            (Array(5., dtype=float32), Array([2., 4.], dtype=float32), True)
        """

        @functools.wraps(fn)
        def scaled(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            value = fn(*args, **kwargs)
            return self.scale_loss(_scalar_loss(value, has_aux=has_aux)), value

        @functools.wraps(fn)
        def value_grads_check(*args: Any, **kwargs: Any) -> tuple[Any, Any, GradCheck]:
            if not self.enabled:
                value, grads = jax.value_and_grad(fn, argnums, has_aux, allow_int=allow_int)(*args, **kwargs)
                return value, grads, GradCheck(np.False_, np.False_)
            grads, value = jax.grad(scaled, argnums, has_aux=True, allow_int=allow_int)(*args, **kwargs)
            grads = self.unscale(grads)
            return value, grads, GradCheck.of(grads, axis_name)

        return value_grads_check

    def update(self, check: CheckLike) -> GradScaler:
        """Give the scaler for the next iteration: the step of `mezzo.LossScaling.next`, on the device.

        Args:
            check: What was found in this iteration's gradients. A bool says whether all was finite; False counts as Inf.

        Returns:
            A new scaler; this one, if it is disabled.

        Example:
            >>> import jax.numpy as jnp
            >>> scaler = GradScaler.create(init_scale=1024.0)
            >>> scaler.update(GradCheck.of(jnp.array([jnp.inf]))).scale
            Array(512., dtype=float32)
        """
        if not self.enabled:
            return self
        found = check if isinstance(check, GradCheck) else GradCheck(jnp.logical_not(finite_in(check)), np.False_)
        inf = jnp.asarray(found.inf)
        with disabled():
            return self._next(inf, jnp.asarray(found.nan) & ~inf)

    # The rule. Each quantity is computed for every verdict and then chosen: these are scalars.

    def _next(self, inf: jax.Array, only_nan: jax.Array) -> GradScaler:
        bad = inf | only_nan
        limit = self.scaling.max_nan_backoffs
        enough = only_nan & (self.nan_backoffs >= min(_MOST, _MOST if limit is None else limit))
        tracker = jnp.minimum(self.growth_tracker, _MOST) + 1
        grows = tracker >= min(self.scaling.growth_interval, _MOST)
        after_finite = jnp.where(grows, self._grown(), self.scale)
        after_bad = jnp.where(enough, self.scale, self._backed_off())
        return replace(
            self,
            scale=jnp.where(bad, after_bad, after_finite),
            growth_tracker=jnp.where(bad | grows, 0, tracker),
            nan_backoffs=jnp.where(only_nan, jnp.where(enough, self.nan_backoffs, self.nan_backoffs + 1), 0),
            skipped=self.skipped + bad.astype(jnp.int32),
        )

    def _grown(self) -> jax.Array:
        grown = times_in_double(self.scale, self.scaling.growth_factor)
        ceiling = self.scaling.max_scale
        bounded = grown if ceiling is None else jnp.minimum(grown, jnp.maximum(self.scale, np.float32(ceiling)))
        return jnp.where(jnp.isfinite(grown), bounded, self.scale)

    def _backed_off(self) -> jax.Array:
        floor = jnp.minimum(self.scale, np.float32(self.scaling.min_scale))
        return jnp.maximum(times_in_double(self.scale, self.scaling.backoff_factor), floor)

    def _unscaled(self, grad: Any) -> Any:
        if not is_inexact(grad):
            return grad
        wide = jnp.asarray(grad).astype(_wide(jnp.result_type(grad)))
        if jnp.issubdtype(wide.dtype, jnp.complexfloating):
            return lax.complex(self._quotient(wide.real), self._quotient(wide.imag))
        return self._quotient(wide)

    def _quotient(self, grad: jax.Array) -> jax.Array:
        # In two steps: the inverse of a scale above 2**126 is subnormal, and XLA takes 0 for it, in a division too.
        first = jnp.where(self.scale < np.float32(2.0**64), np.float32(1.0), np.float32(2.0**-64))
        inverse = 1 / (self.scale * first).astype(grad.dtype)
        return grad * first.astype(grad.dtype) * inverse


# What comes in


def _known(numbers: dict[str, Any]) -> dict[str, Any]:
    names = [field.name for field in fields(LossScaling)]
    for name in set(numbers) - set(names):
        msg = f"GradScaler.create has no number {name!r}; there are {', '.join(names)}.{near(name, names)}"
        raise ScalingError(msg)
    return numbers


def _leaves(state: ScaleState) -> tuple[jax.Array, jax.Array, jax.Array]:
    # Arrays of strong dtypes, each with a buffer of its own: a weak one compiles twice, a shared one cannot be donated.
    return jnp.asarray(state.scale, jnp.float32), _count(state.growth_tracker), _count(state.nan_backoffs)


def _count(number: int) -> jax.Array:
    return jnp.asarray(min(number, _MOST), jnp.int32)


def _wide(dtype: Any) -> Any:
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype(jnp.float32) if narrow else dtype


def _loss_dtype(loss: Any) -> Any:
    is_number = isinstance(loss, float | int | complex)
    dtype = jnp.result_type(loss) if is_number else getattr(loss, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
        return dtype
    came = f"one of dtype {dtype}" if dtype is not None else f"an object of type {type(loss).__name__}"
    msg = f"A loss must be a real array of a float dtype to be scaled, not {came}; return it as float32."
    raise ScalingError(msg)


def _scalar_loss(value: Any, *, has_aux: bool) -> Any:
    if has_aux and not (isinstance(value, tuple) and len(value) == 2):
        msg = f"With has_aux=True the function must return a pair (loss, aux), not {type(value).__name__}."
        raise ScalingError(msg)
    loss = value[0] if has_aux else value
    if isinstance(loss, tuple | list | dict):
        msg = f"The loss must be a scalar, not a {type(loss).__name__}; to return more than the loss pass has_aux=True."
        raise ScalingError(msg)
    _loss_dtype(loss)
    if np.shape(loss) != ():
        msg = f"The loss must be a scalar, not an array of shape {np.shape(loss)}; return its mean or its sum."
        raise ScalingError(msg)
    return loss
