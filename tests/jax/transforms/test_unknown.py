"""Primitives that no table knows run in the dtypes that were traced, with one warning; and teaching them."""

from __future__ import annotations

import itertools
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mezzo import Policy, UnknownOpError
from mezzo.builtin import builtin_policy
from mezzo.errors import OptionError
from mezzo.jax import UnknownPrimitiveWarning, autocast, disabled, register_primitive

from .seen import BF16, F32, arrays, distance, dots, of

_names = (f"tests_own_{number}" for number in itertools.count())


def primitive() -> Primitive:
    """Make a primitive with a name that this process has not seen: it doubles, and insists on one dtype."""
    made = Primitive(next(_names))

    def evaluate(x: Any, y: Any) -> Any:
        assert x.dtype == y.dtype, (x.dtype, y.dtype)
        return 2.0 * x + y

    made.def_impl(evaluate)
    made.def_abstract_eval(lambda x, y: x)
    mlir.register_lowering(made, mlir.lower_fun(evaluate, multiple_results=False))
    batching.defvectorized(made)
    ad.defjvp2(made, lambda ct, _out, x, y: 2.0 * ct, lambda ct, _out, x, y: ct)
    return made


def test_it_gets_the_traced_dtypes_and_one_warning() -> None:
    own = primitive()
    made = autocast(lambda x: own.bind(x @ x, x) @ x, outputs="flow")
    (x,) = arrays((3, 3))
    with pytest.warns(UnknownPrimitiveWarning, match=rf"the primitive '{own.name}' has no rule") as caught:
        assert dots(made, x) == {BF16: 2}
    assert len(caught) == 1
    assert "register_primitive" in str(caught[0].message)
    # From here on a second warning would be an error.
    assert of(own.name, made, x) == [F32]
    assert of(own.name, autocast(lambda x: own.bind(x @ x, x), dtype="float16"), x) == [F32]
    want = (2.0 * (x @ x) + x) @ x
    assert distance(jax.jit(autocast(made))(x), want) < 2e-2


def test_it_works_inside_of_other_functions_and_derivatives() -> None:
    own = primitive()

    def loss(x: jax.Array) -> jax.Array:
        def step(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.vmap(jax.jit(own.bind))(jnp.tanh(h @ x), h), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(step), x, None, 2)[0])

    (x,) = arrays((3, 3))
    with pytest.warns(UnknownPrimitiveWarning):
        found = dots(jax.grad(autocast(loss)), x)
    assert set(found) == {BF16}
    assert distance(jax.jit(jax.grad(autocast(loss)))(x), jax.jit(jax.grad(loss))(x)) < 5e-2


def test_threads_give_one_warning_together() -> None:
    own = primitive()
    (x,) = arrays((3, 3))
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(30)
        jax.make_jaxpr(autocast(lambda x: own.bind(x @ x, x)))(x)

    threads = [threading.Thread(target=work) for _ in range(4)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [own.name in str(each.message) for each in caught] == [True]


def test_in_a_disabled_scope_nothing_is_said() -> None:
    own = primitive()
    (x,) = arrays((3, 3))

    def exact(x: jax.Array) -> jax.Array:
        with disabled():
            return own.bind(x @ x, x)

    assert dots(autocast(exact), x) == {F32: 1}


def test_a_policy_cannot_name_it_before_it_is_registered() -> None:
    own = primitive()
    policy = builtin_policy("default", framework="jax")
    with pytest.raises(UnknownOpError, match=own.name):
        policy.override({own.name: "fp32"})
    register_primitive(own.name)
    assert policy.override({own.name: "fp32"}).rule(own.name) == "fp32"


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (None, "float32"),
        ("lower_precision_fp", "bfloat16"),
        ("fp32", "float32"),
        ("promote", "float32"),
        ("opaque", "float32"),
    ],
)
def test_a_registered_primitive_takes_a_rule_and_gives_no_warning(rule: str | None, expected: str) -> None:
    own = primitive()
    register_primitive(own.name, traits=["compute"])
    policy = builtin_policy("default", framework="jax")
    if rule is not None:
        policy = policy.override({own.name: rule})
    (x,) = arrays((3, 3))
    made = autocast(lambda x: own.bind(x @ x, jnp.exp(x)), policy=policy)
    assert dots(made, x) == {BF16: 1}
    assert of(own.name, made, x) == [(expected,) * 3]


def test_fallthrough_keeps_operands_that_agree_and_lifts_those_that_came_apart() -> None:
    own = primitive()
    register_primitive(own.name, traits=["compute"])
    policy = builtin_policy("default", framework="jax").override({own.name: "fallthrough"})
    (x,) = arrays((3, 3))
    made = autocast(lambda x: (own.bind(x @ x, x @ x), own.bind(x @ x, jnp.exp(x))), policy=policy)
    assert of(own.name, made, x) == [BF16, F32]


def test_a_registered_product_is_left_alone_where_a_precision_was_asked_for() -> None:
    own = primitive()
    register_primitive(own.name, traits=["compute", "dot"])
    policy = builtin_policy("default", framework="jax").override({own.name: "lower_precision_fp"})
    (x,) = arrays((3, 3))
    assert of(own.name, autocast(lambda x: own.bind(x, x), policy=policy), x) == [BF16]


def test_a_default_covers_a_registered_primitive_that_computes() -> None:
    own, other = primitive(), primitive()
    register_primitive(own.name, traits=["compute"])
    register_primitive(other.name)
    (x,) = arrays((3, 3))
    low = x.astype(jnp.bfloat16)
    policy = Policy("all in float32", default="fp32", framework="jax")
    made = autocast(lambda x: (own.bind(x, x), other.bind(x, x)), policy=policy)
    assert of(own.name, made, low) == [F32]
    assert of(other.name, made, low) == [BF16]


def test_registering_twice_is_fine_if_it_says_the_same() -> None:
    own = primitive()
    register_primitive(own.name, traits=["compute"])
    register_primitive(own.name, traits={"compute"})
    with pytest.raises(OptionError, match=rf"'{own.name}' is known already, with the traits compute"):
        register_primitive(own.name, traits=["moves"])


@pytest.mark.parametrize(
    ("name", "traits", "text"),
    [
        ("", (), "registered by its name"),
        (3, (), "registered by its name, a string .*; got 3"),
        ("tests_fresh", ["computes"], r"'computes' is no trait; allowed are .*Did you mean 'compute'\?"),
        ("tests_fresh", ["enters"], "'enters' is no trait"),
        ("dot_general", (), "'dot_general' is known already, with the traits compute, dot"),
    ],
)
def test_a_wrong_registration_is_refused(name: Any, traits: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        register_primitive(name, traits=traits)
