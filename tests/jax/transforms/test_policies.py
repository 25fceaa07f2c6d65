"""Policies for JAX's primitives: overrides, rules by dtype, bans, and functions that are left closed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mezzo import BannedOpError, Policy
from mezzo.builtin import builtin_policy
from mezzo.jax import autocast, disabled

from .seen import BF16, F16, F32, arrays, distance, dots, of, signature

Fn = Callable[..., Any]

DEFAULT = builtin_policy("default", framework="jax")


def inputs() -> list[jax.Array]:
    return arrays((2, 3), (3, 3))


@pytest.mark.parametrize("policy", [None, "default", "unified", "xla", DEFAULT], ids=str)
def test_the_default_by_its_names(policy: Any) -> None:
    x, w = inputs()
    made = autocast(lambda x, w: jnp.exp(jnp.tanh(x @ w)), policy=policy)
    assert dots(made, x, w) == {BF16: 1}
    assert of("tanh", made, x, w) == [BF16[:2]]
    assert of("exp", made, x, w) == [F32[:2]]


def test_fp32_computes_all_in_float32_whatever_comes() -> None:
    x, w = inputs()
    made = autocast(lambda x, w: jnp.tanh(x @ w) + x[:, :3], policy="fp32")
    low = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    for name in ("tanh", "add"):
        assert {dtype for found in of(name, made, *low) for dtype in found} == {"float32"}
    assert dots(made, x, w) == {F32: 1}
    assert jax.eval_shape(made, *low).dtype == jnp.bfloat16


RULES: list[tuple[str, str, Fn, str, str]] = [
    ("tanh", "fp32", jnp.tanh, "float32", "float32"),
    ("exp", "fallthrough", jnp.exp, "bfloat16", "bfloat16"),
    ("exp", "lower_precision_fp", jnp.exp, "bfloat16", "bfloat16"),
    ("tanh", "opaque", jnp.tanh, "float32", "float32"),
    ("add", "opaque", lambda y: y + y, "float32", "float32"),
    ("add", "fp32", lambda y: y + y, "float32", "float32"),
    ("mul", "lower_precision_fp", lambda y: y * jnp.exp(y), "bfloat16", "bfloat16"),
    ("mul", "promote", lambda y: y * jnp.exp(y), "float32", "float32"),
    ("reduce_max", "fp32", jnp.max, "float32", "float32"),
]


@pytest.mark.parametrize(("name", "rule", "fn", "came", "gave"), RULES, ids=[" ".join(rule[:2]) for rule in RULES])
def test_an_override_changes_one_primitive(name: str, rule: str, fn: Fn, came: str, gave: str) -> None:
    x, w = inputs()
    made = autocast(lambda x, w: fn(x @ w), policy=DEFAULT.override({name: rule}), outputs="flow")
    assert dots(made, x, w) == {BF16: 1}
    (found,) = of(name, made, x, w)
    assert (found[0], found[-1]) == (came, gave)


@pytest.mark.parametrize("rule", ["fp32", "opaque", "fallthrough", "promote"])
def test_dots_follow_their_rule(rule: str) -> None:
    x, w = inputs()
    made = autocast(lambda x, w: x @ w, policy=DEFAULT.override({"dot_general": rule}))
    assert dots(made, x, w) == {F32: 1}
    mixed = autocast(lambda x, w: (x @ w) @ w, policy=DEFAULT.override({"dot_general": rule}), outputs="flow")
    grads = dots(jax.grad(lambda w: jnp.sum(mixed(x, w))), w)
    assert set(grads) == {F32}


def test_a_rule_may_differ_between_the_dtypes() -> None:
    x, w = inputs()
    policy = DEFAULT.override({"tanh": {"bfloat16": "fallthrough", "float16": "fp32"}})
    found = {
        low: of("tanh", autocast(lambda x, w: jnp.tanh(x @ w), dtype=low, policy=policy), x, w)
        for low in ("bfloat16", "float16")
    }
    assert found == {"bfloat16": [BF16[:2]], "float16": [F32[:2]]}


@pytest.mark.parametrize(("name", "fn"), [("integer_pow", lambda y: y**3), ("erfc", lax.erfc)])
def test_the_table_itself_differs_between_the_dtypes(name: str, fn: Fn) -> None:
    x, w = inputs()
    for low, expected in ((BF16, BF16[:2]), (F16, F32[:2])):
        made = autocast(lambda x, w: fn(x @ w), dtype=low[0])
        assert dots(made, x, w) == {low: 1}
        assert of(name, made, x, w) == [expected]


def test_a_product_of_a_value_with_itself_is_a_square() -> None:
    x, w = inputs()

    def spread(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return y * y, y * (y + 1.0), jnp.square(y)

    made = autocast(spread, outputs="flow")
    assert [leaf.dtype.name for leaf in jax.eval_shape(made, x, w)] == ["float32", "bfloat16", "float32"]
    # Only where the rule of mul is the table's: an override counts more.
    own = autocast(spread, outputs="flow", policy=DEFAULT.override({"mul": "lower_precision_fp"}))
    assert jax.eval_shape(own, x, w)[0].dtype == jnp.bfloat16


@jax.custom_jvp
def _own(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


_own.defjvp(lambda primals, tangents: (_own(*primals), tangents[0]))


CLOSED: dict[str, Fn] = {
    "jit": lambda x, w: jax.jit(lambda x: x @ w)(x),
    "remat2": lambda x, w: jax.checkpoint(lambda x: x @ w)(x),
    "scan": lambda x, w: lax.scan(lambda h, _: (h @ w, None), x, None, 2)[0],
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x),
    "custom_jvp_call": _own,
}


@pytest.mark.parametrize("name", ["jit", "remat2", "scan", "cond", "custom_jvp_call"])
def test_a_function_inside_is_left_closed_on_request(name: str) -> None:
    def net(x: jax.Array, w: jax.Array) -> jax.Array:
        return CLOSED[name](jnp.tanh(x @ w), w) @ w

    x, w = inputs()
    assert dots(autocast(net), x, w) == {BF16: 3}
    made = autocast(net, policy=DEFAULT.override({name: "opaque"}))
    assert dots(made, x, w) == {BF16: 2, F32: 1}
    assert signature(made, x, w) == signature(net, x, w)
    assert distance(jax.jit(made)(x, w), jax.jit(net)(x, w)) < 3e-2


@pytest.mark.parametrize("name", ["pjit", "checkpoint", "remat"])
def test_names_of_other_releases_mean_the_same(name: str) -> None:
    canonical = {"pjit": "jit"}.get(name, "remat2")
    assert DEFAULT.override({name: "opaque"}) == DEFAULT.override({canonical: "opaque"})


def test_loops_and_rules_are_entered_by_policy_too() -> None:
    @jax.custom_vjp
    def own(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    own.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct))

    def net(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.while_loop(lambda h: jnp.sum(h) < 1e3, lambda h: jnp.abs(h @ w), own(x, w))

    x, w = inputs()
    assert dots(autocast(net), x, w) == {F32: 2}
    assert dots(autocast(net, policy=DEFAULT.override({"while": "fallthrough"})), x, w) == {BF16: 1, F32: 1}
    assert dots(autocast(net, policy=DEFAULT.override({"custom_vjp_call": "fallthrough"})), x, w) == {BF16: 1, F32: 1}


def banned_line(x: jax.Array) -> jax.Array:
    y = x @ x
    return jnp.exp(y)


@pytest.mark.parametrize(
    "around", [lambda f: f, jax.jit, jax.grad, jax.checkpoint], ids=["plain", "jit", "grad", "remat"]
)
def test_a_ban_names_primitive_policy_and_source_line(around: Fn) -> None:
    policy = DEFAULT.override({"exp": "banned"}, name="strict")
    line = inspect.getsourcelines(banned_line)[1] + 2
    inner = (lambda x: jnp.sum(banned_line(x))) if around is jax.grad else banned_line
    text = rf"exp is banned by the policy 'strict', and .*test_policies\.py:{line}.*calls it with bfloat16"
    with pytest.raises(BannedOpError, match=text):
        autocast(around(inner), policy=policy)(jnp.ones((2, 2)))


def test_a_ban_says_what_to_do_and_that_works() -> None:
    policy = DEFAULT.override({"exp": "banned"})
    (x,) = arrays((2, 2))
    with pytest.raises(BannedOpError, match=r"Call it inside mezzo\.jax\.disabled\(\).*override\(\{'exp': 'fp32'\}\)"):
        autocast(jnp.exp, policy=policy)(x)

    def allowed(x: jax.Array) -> jax.Array:
        y = x @ x
        with disabled():
            return jnp.exp(y)

    assert dots(autocast(allowed, policy=policy), x) == {BF16: 1}
    assert of("exp", autocast(allowed, policy=policy), x) == [F32[:2]]
    assert of("exp", autocast(jnp.exp, policy=policy.override({"exp": "fp32"})), x) == [F32[:2]]


def test_a_ban_of_low_operands_allows_float32() -> None:
    policy = DEFAULT.override({"tanh": "banned_lower_precision"})
    (x,) = arrays((2, 2))
    assert of("tanh", autocast(jnp.tanh, policy=policy), x) == [F32[:2]]
    with pytest.raises(BannedOpError, match="tanh is banned"):
        autocast(lambda x: jnp.tanh(x @ x), policy=policy)(x)


@pytest.mark.parametrize("name", ["scan", "jit", "cond"])
def test_a_function_that_encloses_others_can_be_banned(name: str) -> None:
    x, w = inputs()
    with pytest.raises(BannedOpError, match=f"{name} is banned by the policy"):
        autocast(CLOSED[name], policy=DEFAULT.override({name: "banned"}))(x, w)


def test_a_policy_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    DEFAULT.override({"tanh": "fp32"}, name="mine").save(path)
    x, w = inputs()
    for given in (path, str(path)):
        made = autocast(lambda x, w: jnp.tanh(x @ w), policy=given)
        assert dots(made, x, w) == {BF16: 1}
        assert of("tanh", made, x, w) == [F32[:2]]


def test_a_policy_of_ones_own_has_rules_for_what_it_lists_only() -> None:
    policy = Policy("dots only", {"dot_general": "lower_precision_fp"}, framework="jax")
    x, w = inputs()
    made = autocast(lambda x, w: jax.jit(lambda y: jnp.tanh(y + 1.0).T.reshape(-1))(x @ w), policy=policy)
    assert dots(made, x, w) == {BF16: 1}
    assert of("tanh", made, x, w) == [F32[:2]]
    assert of("add", made, x, w) == [F32]
