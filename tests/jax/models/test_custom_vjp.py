"""Functions with a custom VJP: a library's own, and one like a library's attention; opaque, and entered on request."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax.linen import fp8_ops
from jax import lax

from mezzo.jax import autocast

from .nets import LOW_DTYPES, Case, Draw, check, check_close, check_dots, dots, equations, run, unit

BLOCK = 4


@jax.custom_vjp
def blockwise_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention block by block of keys, with running maxima and sums, as fast kernels compute it."""
    return _forward(q, k, v)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    def block(carry: Any, keys_and_values: Any) -> tuple[Any, None]:
        most, total, out = carry
        keys, values = keys_and_values
        logits = q @ keys.T
        new_most = jnp.maximum(most, logits.max(-1))
        weights, factor = jnp.exp(logits - new_most[:, None]), jnp.exp(most - new_most)
        return (new_most, total * factor + weights.sum(-1), out * factor[:, None] + weights @ values), None

    start = (jnp.full(len(q), -jnp.inf), jnp.zeros(len(q)), jnp.zeros((len(q), v.shape[1])))
    blocks = jax.tree.map(lambda x: x.reshape(-1, BLOCK, x.shape[1]), (k, v))
    (most, total, out), _ = lax.scan(block, start, blocks)
    out = out / total[:, None]
    return out, (q, k, v, out, most + jnp.log(total))


def _backward(kept: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, out, logsumexp = kept
    weights = jnp.exp(q @ k.T - logsumexp[:, None])
    slope = weights * (cotangent @ v.T - jnp.sum(cotangent * out, -1, keepdims=True))
    return slope @ k, slope.T @ q, weights.T @ cotangent


blockwise_attention.defvjp(_forward, _backward)
INSIDE = 2 + 5  # dots of the forward and the backward rule


@cache
def attention() -> Case:
    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v = (x @ params[name] for name in "qkv")
        out = blockwise_attention(q, k, v) @ params["o"]
        return jnp.mean((out - 1.0) ** 2), out

    draw = Draw()
    return Case(loss, {name: draw(8, 8) for name in "qkvo"}, draw(12, 8, scale=1.0))


def test_the_blockwise_attention_of_this_file_is_attention() -> None:
    draw = Draw()
    q, k, v = (draw(12, 8, scale=1.0) for _ in "qkv")

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.softmax(q @ k.T) @ v

    fns = [lambda *qkv, f=f: jnp.sum(f(*qkv) ** 2) for f in (blockwise_attention, plain)]
    got, want = (run(jax.value_and_grad(f, (0, 1, 2)), q, k, v)[0] for f in fns)
    check_close(got, want, 1e-5)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize(("option", "high"), [("opaque", INSIDE), ("enter", 0)])
def test_a_custom_vjp_agrees_with_float32(option: str, high: int, dtype: str) -> None:
    check(attention(), dtype, value=3, gradient=8, high=high, custom_vjp=option)


@pytest.mark.parametrize(("names", "high"), [(["blockwise_attention", "f"], 0), (["f"], INSIDE), ([], INSIDE)], ids=str)
def test_a_custom_vjp_is_entered_by_the_name_of_its_function(names: list[str], high: int) -> None:
    case = attention()
    option = dict.fromkeys(names, "enter")
    jaxpr = jax.make_jaxpr(jax.grad(autocast(case.loss, custom_vjp=option), has_aux=True))(*case.args)
    check_dots(jaxpr, "bfloat16", total=case.dots, high=high)


def rules_of(jaxpr: Any) -> list[str]:
    return [eqn.primitive.name for eqn in equations(jaxpr) if eqn.primitive.name.startswith("custom_vjp")]


@pytest.mark.parametrize("option", ["opaque", "enter"])
def test_a_custom_vjp_stays_one(option: str) -> None:
    case = attention()
    jaxpr = jax.make_jaxpr(autocast(case.loss, custom_vjp=option))(*case.args)
    assert len(rules_of(jaxpr)) == 1
    # The products of q, k, v and o, and the two of the rule.
    low = ("bfloat16",) * 3
    assert dots(jaxpr) == ({low: 4, ("float32",) * 3: 2} if option == "opaque" else {low: 6})


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("option", ["opaque", "enter"])
def test_scale_gradient_of_optax_scales_the_gradient(option: str, dtype: str) -> None:
    def loss(weights: jax.Array, x: jax.Array, factor: float = 0.25) -> jax.Array:
        return jnp.mean((optax.scale_gradient(x @ weights, factor) - 1.0) ** 2)

    draw = Draw()
    args = draw(8, 8), draw(4, 8, scale=1.0)
    want = jax.grad(loss)(*args, 1.0)
    got, jaxpr = run(jax.grad(autocast(loss, dtype, custom_vjp=option)), *args)
    assert dots(jaxpr) == {(dtype,) * 3: 2}
    check_close(got, 0.25 * want, 3 * unit(dtype))


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_flax_float8_products_keep_their_rule_and_their_dtypes(dtype: str) -> None:
    """The dot of Fp8DirectDotGeneralOp is a custom VJP with float8 operands, between two ordinary layers."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dense(8, use_bias=False)(x)
            x = nn.Dense(8, use_bias=False, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)(x)
            return nn.Dense(8, use_bias=False)(x)

    net, x = Net(), Draw()(8, 8, scale=1.0)
    state = net.init(jax.random.key(0), x)

    def loss(params: Any, rest: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(net.apply({"params": params, **rest}, x) ** 2)

    rest = {name: leaf for name, leaf in state.items() if name != "params"}
    want, plain = run(jax.value_and_grad(loss), state["params"], rest, x)
    got, jaxpr = run(jax.value_and_grad(autocast(loss, dtype)), state["params"], rest, x)
    ours, theirs = dots(jaxpr), dots(plain)
    assert ours.pop((dtype,) * 3) == theirs.pop(("float32",) * 3)
    assert ours == theirs
    assert any("float8" in name for key in theirs for name in key)
    # Float8 rounds to 2**-4: a rounding in front of it moves some numbers to their neighbours.
    check_close(got, want, 0.05 + 4 * unit(dtype))
