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

from .autocast import autocast
from .explain import explain
from .functions import cast_inputs, upcast
from .grad_check import GradCheck
from .master_weights import MasterWeightsState, master_weights
from .ops import UnknownPrimitiveWarning, register_primitive
from .optax_wrappers import LossScaledState, loss_scaled
from .scaler import GradScaler
from .scopes import disabled
from .stepping import apply_if

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
