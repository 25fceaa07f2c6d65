"""`master_weights`: float32 copies of parameters that are stored in low precision, inside of an optax optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mezzo.errors import OptionError
from mezzo.jax.optax_wrappers import as_transformation, import_optax

__all__ = ["MasterWeightsState", "master_weights"]


class MasterWeightsState(NamedTuple):
    """The state of `master_weights`.

    Attributes:
        masters: The tree of parameters, each float array narrower than float64 in float32. What else is in the tree
            (float64, integers, complex) has None here and is its own master.
        inner_state: The state of the wrapped optimizer, which knows the masters only.
    """

    masters: Any
    inner_state: Any


def master_weights(tx: Any) -> Any:
    """Wrap an optimizer so that parameters stored in bfloat16 or float16 are trained in float32.

    Small steps vanish when they are added to a bfloat16 number: 1 + 0.001 is 1. So a float32 copy of each parameter, its
    master, is kept in the state; the optimizer steps the masters, and the parameters are these, rounded. Parameters that
    are stored in float32 need none of it.

    The updates are float32, made for `optax.apply_updates`, which adds in float32 and rounds to the dtype of the parameter:
    the result is the new master, rounded. Where a step shrinks a weight by more than a factor of 2**13 (bfloat16: 2**15) the
    sum may be off by 2**-24 of the old weight, until the next step. Libraries that add without rounding to the parameter's
    dtype, such as ``equinox.apply_updates``, leave float32 parameters: use optax's.

    Parameters that something else changed (clipping of weights, an average) are taken back to the masters by the next step;
    make a new state with ``init`` after that. It works around or inside of `loss_scaled`.

    Args:
        tx: The optimizer: an ``optax.GradientTransformation`` or ``optax.MultiSteps``. It sees float32 parameters and
            gradients. Extra arguments of ``update`` are passed on to it.

    Returns:
        An ``optax.GradientTransformationExtraArgs``. ``init`` takes the parameters in float32, to begin with all their
        digits, or as they are stored; ``update`` takes them as they are stored. The state is a `MasterWeightsState`, which
        any checkpoint library saves.

    Raises:
        ModuleNotFoundError: optax is not installed.
        OptionError: ``tx`` is no optimizer; in ``update``: no parameters were given, or not the tree of ``init``.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> tx = master_weights(optax.sgd(0.001))
        >>> weight = jnp.ones(2, jnp.bfloat16)
        >>> state = tx.init(weight)
        >>> for _ in range(3):
        ...     updates, state = tx.update(jnp.ones(2, jnp.bfloat16), state, weight)
        ...     weight = optax.apply_updates(weight, updates)
        ...     print(f"{state.masters[0]:.3f}", weight[0], weight.dtype)
        0.999 1 bfloat16
        0.998 0.996094 bfloat16
        0.997 0.996094 bfloat16
    """
    optax = import_optax("master_weights")
    inner = optax.with_extra_args_support(as_transformation(tx))

    def init(params: Any) -> MasterWeightsState:
        masters = jax.tree.map(_master, params)
        return MasterWeightsState(masters, inner.init(_filled(masters, params)))

    def update(
        updates: Any, state: MasterWeightsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MasterWeightsState]:
        _check(params, state.masters)
        old = _filled(state.masters, params)
        grads = jax.tree.map(_widened, updates)
        steps, inner_state = inner.update(grads, state.inner_state, old, **extra_args)
        new = optax.apply_updates(old, steps)
        masters = jax.tree.map(
            lambda kept, value: None if kept is None else value, state.masters, new, is_leaf=_is_none
        )
        moves = jax.tree.map(_move, steps, masters, params, is_leaf=_is_none)
        return moves, MasterWeightsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _has_master(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize <= 4


def _master(param: Any) -> Any:
    # A copy also of float32: parameters and state may both be donated, and so must not share a buffer.
    return jnp.array(param, jnp.float32, copy=True) if _has_master(param) else None


def _widened(grad: Any) -> Any:
    return grad.astype(jnp.float32) if _has_master(grad) else grad


def _filled(masters: Any, params: Any) -> Any:
    return jax.tree.map(lambda param, master: param if master is None else master, params, masters, is_leaf=_is_none)


def _move(step: Any, master: Any, param: Any) -> Any:
    """Give what takes a parameter to its new master, rounded."""
    if master is None:
        return step
    # Towards the rounded master, so that the sum needs no more digits than float32 has. The barrier keeps the rounding,
    # which XLA may leave out where it can see that the number is made float32 again.
    rounded = lax.optimization_barrier(master.astype(param.dtype)).astype(jnp.float32)
    return rounded - param.astype(jnp.float32)


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _check(params: Any, masters: Any) -> None:
    if params is None:
        msg = "master_weights needs the parameters to step them; call tx.update(grads, state, params)."
        raise OptionError(msg)
    stored, kept = (str(jax.tree.structure(tree, is_leaf=_is_none)) for tree in (params, masters))
    if stored != kept:
        msg = (
            f"master_weights was made for parameters in the tree {kept} and got {stored}; pass those that `init` got, or "
            "make a new state with `init`."
        )
        raise OptionError(msg)
