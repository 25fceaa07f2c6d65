"""A training step and an evaluation in JAX, in one of the precisions: pure functions of a state, made to be compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from mezzo.demo.arrays import SIDE
from mezzo.demo.jax_model import RowTransformer
from mezzo.jax import GradScaler, apply_if, autocast

if TYPE_CHECKING:
    from collections.abc import Callable

    from mezzo.demo.results import Plan, Precision


_MODEL = RowTransformer()


class State(NamedTuple):
    """What goes from step to step.

    Args:
        params: The weights, float32.
        moments: The optimizer's state.
        scaler: The gradient scaler; a disabled one, which costs nothing, unless the precision is float16.
    """

    params: Any
    moments: Any
    scaler: GradScaler


class Training:
    """How one precision trains: functions for `jax.jit`.

    Args:
        precision: "float32" without autocast, "bfloat16" under it, "float16" under it and with a gradient scaler.
        plan: How fast, and the seed of the weights.
        steps: Of the whole training, for the schedule of the learning rate.

    Example:
        >>> from mezzo.demo.results import Plan
        >>> training = Training("bfloat16", Plan(), steps=10)
        >>> jax.eval_shape(training.loss, training.start().params, jnp.ones((4, 8, 8)), jnp.arange(4))
        ShapeDtypeStruct(shape=(), dtype=float32)
    """

    def __init__(self, precision: Precision, plan: Plan, steps: int) -> None:
        self._precision = precision
        self._plan = plan
        # The schedule counts in the optimizer's state: a skipped step, which leaves that alone, does not advance it.
        schedule = optax.cosine_onecycle_schedule(steps, plan.learning_rate)
        self._optimizer = optax.adamw(schedule, weight_decay=plan.weight_decay)
        # These two, and the scaler's switch in `start`, are all that a precision changes.
        self.loss: Callable[..., jax.Array] = self.plain_loss
        self._predict: Callable[..., jax.Array] = self._logits
        if precision != "float32":
            self.loss, self._predict = autocast(self.plain_loss, precision), autocast(self._logits, precision)

    def start(self) -> State:
        """Make the state before the first step: weights that depend on the plan's seed only."""
        params = _weights(jax.random.key(self._plan.seed))
        # Float16 gradients are too small without a scale; bfloat16 has float32's range and needs none.
        scaler = GradScaler.create(enabled=self._precision == "float16", growth_interval=self._plan.growth_interval)
        return State(params, self._optimizer.init(params), scaler)

    def plain_loss(self, params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        """Give the mean loss of a batch, float32, as it is written."""
        return _cross_entropy(self._logits(params, images), labels)

    def step(
        self, state: State, images: jax.Array, labels: jax.Array, chosen: jax.Array
    ) -> tuple[State, jax.Array, jax.Array]:
        """Make one step with the samples at the positions `chosen`, int32.

        Returns:
            The new state; the loss, float32; whether the step was made and not skipped, bool.
        """
        differentiated = state.scaler.value_and_grad(self.loss)
        loss, gradients, check = differentiated(state.params, images[chosen], labels[chosen])

        def update(params: Any, moments: Any) -> tuple[Any, Any]:
            changes, moments = self._optimizer.update(gradients, moments, params)
            return optax.apply_updates(params, changes), moments

        params, moments = apply_if(check, update, state.params, state.moments)
        return State(params, moments, state.scaler.update(check)), loss, jnp.asarray(check.finite)

    def evaluate(self, state: State, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Give the loss, and the share that is classified right, both float32."""
        logits = self._predict(state.params, images)
        return _cross_entropy(logits, labels), (logits.argmax(1) == labels).astype(jnp.float32).mean()

    def _logits(self, params: Any, images: jax.Array) -> jax.Array:
        logits: Any = _MODEL.apply(params, images)
        return jnp.asarray(logits)


@jax.jit  # once for all precisions; op by op, each op would be compiled for each of its shapes
def _weights(key: jax.Array) -> Any:
    return _MODEL.init(key, jnp.zeros((1, SIDE, SIDE)))


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
