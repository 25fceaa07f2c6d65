"""The JAX adapter: autocast as a transformation of functions, and loss scaling as a pytree.

Example:
    >>> import jax, jax.numpy as jnp
    >>> from mezzo.jax import autocast
    >>> def loss(w, x):
    ...     return jnp.square(x @ w).mean()
    >>> step = jax.jit(jax.value_and_grad(autocast(loss, "bfloat16")))
    >>> value, gradient = step(jnp.ones((4, 3)), jnp.ones((2, 4)))
    >>> gradient.dtype
    dtype('float32')
"""

from mezzo.jax.autocast import autocast
from mezzo.jax.explain import explain
from mezzo.jax.functions import cast_inputs, upcast
from mezzo.jax.grad_check import GradCheck
from mezzo.jax.master_weights import MasterWeightsState, master_weights
from mezzo.jax.ops import UnknownPrimitiveWarning, register_primitive
from mezzo.jax.optax_wrappers import LossScaledState, loss_scaled
from mezzo.jax.scaler import GradScaler
from mezzo.jax.scopes import disabled
from mezzo.jax.stepping import apply_if

__all__ = [
    "autocast",
    "disabled",
    "upcast",
    "cast_inputs",
    "explain",
    "GradScaler",
    "GradCheck",
    "apply_if",
    "loss_scaled",
    "LossScaledState",
    "master_weights",
    "MasterWeightsState",
    "register_primitive",
    "UnknownPrimitiveWarning",
]
