"""The ways of computing a JAX model's gradients in bfloat16 that are compared: float32, by hand, peers, mezzo.

A peer that is not installed, or that fails on this JAX, is a row that says so. They are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from benchmarks.jax_cases import AROUND, CONTROL, HAND, MEZZO
from benchmarks.jax_models import LOW

if TYPE_CHECKING:
    from jax import Array

    from benchmarks.jax_models import Model

Loss = Callable[..., Any]
Step = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True)
class Way:
    """How a step is made of a model.

    Attributes:
        loss: The loss in this way, or None where the way begins at the gradient or does not exist for the model.
        step: Parameters and data to loss and gradients; made anew at each call, so that nothing traced is found again.
    """

    loss: Callable[[Model], Loss | None]
    step: Callable[[Model], Step]


def _differentiated(loss: Callable[[Model], Loss]) -> Way:
    return Way(loss, lambda model: jax.value_and_grad(loss(model)))


def _anew(function: Loss) -> Loss:
    """The same function as another object: JAX finds what it has traced by the function."""

    def anew(*arguments: Any) -> Any:
        return function(*arguments)

    return anew


def _jmp(model: Model) -> Loss:
    return _jmp_cast(model.loss)


def _jmp_float32_norms(model: Model) -> Loss:
    if model.float32_norms is None:
        message = "a model without norms"
        raise LeftOutError(message)
    return _jmp_cast(model.float32_norms)


def _jmp_cast(function: Loss) -> Loss:
    import jmp

    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")

    def loss(*arguments: Any) -> Any:
        return policy.cast_to_output(function(*policy.cast_to_compute(arguments)))

    return loss


def _mpx_step(model: Model) -> Step:
    import jax.numpy as jnp
    import mpx

    # The dtype as an object: it ignores names. A scale of 1 that never grows: bfloat16 needs none.
    mpx.set_half_precision_datatype(LOW)
    one = jnp.ones((), jnp.float32)
    gradients = mpx.filter_value_and_grad(_anew(model.loss), scaling=mpx.DynamicLossScaling(one, one, period=2**30))

    def step(*arguments: Any) -> tuple[Any, Any]:
        value, _, _, found = gradients(*arguments)
        return value, found

    return step


def _jaxamp(model: Model) -> Loss:
    import jaxamp

    return jaxamp.amp(_anew(model.loss), compute_dtype=LOW)


def _grampax(model: Model) -> Loss:
    import grampax

    return grampax.autocast(_anew(model.loss), dtype=LOW)


def _mezzo(model: Model) -> Loss:
    from mezzo.jax import autocast

    return autocast(_anew(model.loss), dtype="bfloat16")


def _mezzo_around(model: Model) -> Step:
    from mezzo.jax import autocast

    return autocast(jax.value_and_grad(_anew(model.loss)), dtype="bfloat16")


def _begins_at_the_gradient(_: Model) -> None:
    return None


class LeftOutError(RuntimeError):
    """A way that does not apply to a model."""


# By the names in `benchmarks.jax_cases.TITLES`.
WAYS: dict[str, Way] = {
    "float32": _differentiated(lambda model: _anew(model.loss)),
    MEZZO: _differentiated(_mezzo),
    HAND: _differentiated(lambda model: _anew(model.by_hand)),
    AROUND: Way(_begins_at_the_gradient, _mezzo_around),
    CONTROL: _differentiated(lambda model: _anew(model.by_hand)),
    "jmp": _differentiated(_jmp),
    "jmp-norms": _differentiated(_jmp_float32_norms),
    "mpx": Way(_begins_at_the_gradient, _mpx_step),
    "jaxamp": _differentiated(_jaxamp),
    "grampax": _differentiated(_grampax),
}


def relative_error(found: Any, exact: Any) -> float:
    """How far gradients are from others, all parameters as one vector, relative to its length."""
    import numpy as np

    def flat(tree: Any) -> Array:
        leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
        return np.concatenate(leaves)

    true = flat(exact)
    return float(np.linalg.norm(flat(found) - true) / np.linalg.norm(true))
