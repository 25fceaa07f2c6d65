"""`loss_scaled`: loss scaling inside of an optax optimizer."""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from mezzo.errors import OptionError
from mezzo.jax.grad_check import look
from mezzo.jax.scaler import GradScaler
from mezzo.jax.stepping import Skip, step_or_stay

__all__ = ["LossScaledState", "loss_scaled"]


class LossScaledState(NamedTuple):
    """The state of `loss_scaled`.

    Attributes:
        scaler: The scaler whose scale the next loss has to have.
        inner_state: The state of the wrapped optimizer. It has not seen the steps that were skipped.
        last_finite: bool of no dimension: whether the last step was made. True to begin with.
    """

    scaler: GradScaler
    inner_state: Any
    last_finite: jax.Array


def loss_scaled(
    tx: Any,
    scaler: GradScaler | None = None,
    *,
    axis_name: Hashable | None = None,
    skip: Skip = "cond",
) -> Any:
    """Wrap an optimizer so that it takes the gradients of a scaled loss.

    ``update`` unscales the gradients, checks them, calls ``tx.update`` if all are finite, and moves the scale. Otherwise the
    updates are zeros and ``tx`` does not know of the step: moments, counts and schedules stay.

    The scale is in the state, so the loss gets it from there: ``opt_state.scaler.scale_loss(loss)``, or wherever the state
    is nested: ``optax.tree.get(opt_state, "scaler").scale_loss(loss)``. Do not use `GradScaler.value_and_grad` for it: its
    gradients are unscaled already.

    What must see true gradients, such as clipping, belongs inside: ``loss_scaled(optax.chain(optax.clip_by_global_norm(1.0),
    optax.adam(1e-3)))``. So does `optax.MultiSteps`: each micro-batch is then checked and skipped alone; around it an Inf
    would stay in what optax adds up.

    Args:
        tx: The optimizer: an ``optax.GradientTransformation`` or ``optax.MultiSteps``. Extra arguments of ``update`` are
            passed on to it.
        scaler: What to begin with; None takes `GradScaler.create()`. ``init`` copies its arrays.
        axis_name: Mapped axes whose members are to agree, as in `GradCheck.of`; for gradients that are not averaged before.
        skip: As in `apply_if`.

    Returns:
        An ``optax.GradientTransformationExtraArgs``. Its state is a `LossScaledState`; its updates have the dtypes that
        ``tx`` gives for float32 gradients.

    Raises:
        ModuleNotFoundError: optax is not installed.
        OptionError: ``tx``, ``scaler`` or ``skip`` is something else.
        ScalingError: In ``update``: ``tx`` changes the dtypes of its own state.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> tx = loss_scaled(optax.sgd(0.1), GradScaler.create(init_scale=2.0**10))
        >>> @jax.jit
        ... def train_step(weight, opt_state, x):
        ...     def scaled_loss(weight):
        ...         loss = ((x @ weight.astype(jnp.float16)) ** 2).mean()
        ...         return opt_state.scaler.scale_loss(loss), loss
        ...     grads, loss = jax.grad(scaled_loss, has_aux=True)(weight)
        ...     updates, opt_state = tx.update(grads, opt_state, weight)
        ...     return optax.apply_updates(weight, updates), opt_state, loss
        >>> weight = jnp.ones(4)
        >>> opt_state = tx.init(weight)
        >>> for factor in (1.0, jnp.inf):
        ...     weight, opt_state, loss = train_step(weight, opt_state, jnp.full((2, 4), factor, jnp.float16))
        ...     print(weight[0], opt_state.scaler.scale, opt_state.last_finite)
        0.19999999 1024.0 True
        0.19999999 512.0 False
    """
    optax = import_optax("loss_scaled")
    if scaler is not None and not isinstance(scaler, GradScaler):
        msg = f"scaler must be a mezzo.jax.GradScaler or None, not {scaler!r}; make one with GradScaler.create()."
        raise OptionError(msg)
    if skip not in get_args(Skip):
        msg = f"skip must be 'cond' or 'select', not {skip!r}; 'cond' is right for most programs."
        raise OptionError(msg)
    inner = optax.with_extra_args_support(as_transformation(tx))
    first = GradScaler.create() if scaler is None else scaler

    def init(params: Any) -> LossScaledState:
        # Copies: the state may be donated, and `first` has to last for the next `init`.
        return LossScaledState(jax.tree.map(_copy, first), inner.init(params), jnp.ones((), bool))

    def update(
        updates: Any, state: LossScaledState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, LossScaledState]:
        scaler, old = state.scaler, state.inner_state

        def step(inner_state: Any) -> tuple[Any, Any]:
            # Unscaled here, not before: then the gradients need no second place in memory.
            new_updates, new_state = inner.update(scaler.unscale(updates), inner_state, params, **extra_args)
            return new_state, new_updates

        if not scaler.enabled:
            inner_state, new_updates = step(old)
            return new_updates, state._replace(inner_state=inner_state)
        check = look(scaler.unscale, updates, axis_name)
        _, shapes = jax.eval_shape(lambda: step(old))
        inner_state, new_updates = step_or_stay(check.finite, step, old, lambda: _zeros(shapes, updates), skip)
        return new_updates, LossScaledState(scaler.update(check), inner_state, jnp.asarray(check.finite))

    return optax.GradientTransformationExtraArgs(init, update)


def import_optax(name: str) -> Any:
    """Import optax for a function that needs it; mezzo.jax by itself does not.

    Args:
        name: The function, for the message.

    Returns:
        The module.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    try:
        return importlib.import_module("optax")
    except ModuleNotFoundError as error:
        if error.name != "optax":
            raise
        msg = f"mezzo.jax.{name} wraps optimizers of optax, which is not installed; run `pip install optax`."
        raise ModuleNotFoundError(msg, name="optax") from error


def as_transformation(tx: Any) -> Any:
    """Give an optimizer as a pair of functions; `optax.MultiSteps` is a class of its own.

    Args:
        tx: A ``GradientTransformation``, or what has ``gradient_transformation()``.

    Returns:
        A ``GradientTransformation``.

    Raises:
        OptionError: It is neither.
    """
    if hasattr(tx, "gradient_transformation"):
        return tx.gradient_transformation()
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        return tx
    msg = f"Expected an optimizer of optax, got {tx!r}; pass one such as optax.adam(1e-3)."
    raise OptionError(msg)


def _copy(leaf: Any) -> jax.Array:
    return jnp.array(leaf, copy=True)


def _zeros(shapes: Any, grads: Any) -> Any:
    """Make the updates of a skipped step."""
    # From the gradients, as these know how they are sharded.
    return jax.tree.map(lambda shape, grad: jnp.zeros_like(grad, shape.dtype), shapes, grads)
