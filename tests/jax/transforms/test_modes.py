"""Autocast under JAX's checks and modes: leaks, NaNs, strict promotion, no jit, checkify."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import checkify

from mezzo.jax import autocast, disabled, upcast

from .seen import BF16, F32, arrays, distance, dots, signature

Fn = Callable[..., Any]

CLOSE = 3e-2


def net(params: dict[str, jax.Array], xs: jax.Array) -> jax.Array:
    """A bit of everything: literals, a mask, a scan, a branch, remat, and rules of one's own."""

    @jax.checkpoint  # type: ignore[untyped-decorator]
    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jax.nn.relu(h @ params["w"] + params["b"]) + x
        h = lax.cond(jnp.sum(h) > 0.0, lambda: h * 0.5, lambda: jax.nn.softplus(h))
        return h, jnp.where(h > 0, h, -1e9).max()

    h, tops = lax.scan(step, jnp.zeros(3), xs)
    with disabled():
        spread = jnp.var(h)
    return jnp.sum(jax.nn.softmax(upcast(h))) + jnp.mean(tops) / jnp.sqrt(spread + 1e-6)


def inputs() -> tuple[dict[str, jax.Array], jax.Array]:
    w, b, xs = arrays((3, 3), (3,), (2, 3))
    return {"w": w / 2, "b": b}, jnp.abs(xs)


@contextmanager
def option(name: str, value: Any) -> Iterator[None]:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


MODES: dict[str, Fn] = {
    "enable_checks": lambda: option("jax_enable_checks", True),
    "debug_nans": lambda: jax.debug_nans(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "strict rank": lambda: jax.numpy_rank_promotion("raise"),
    "no implicit transfers": lambda: jax.transfer_guard("disallow"),
    "custom prng": lambda: jax.default_prng_impl("rbg"),
}


# These change what is traced only; the others what is compiled or how it runs.
TRACED = ("strict promotion", "strict rank", "custom prng")


@pytest.mark.parametrize("mode", MODES)
def test_a_train_loss_and_its_gradient_work_in_the_mode(mode: str) -> None:
    params, xs = inputs()
    plain = signature(jax.value_and_grad(net), params, xs)
    with MODES[mode]():
        made = jax.jit(jax.value_and_grad(autocast(net)))
        assert set(dots(made, params, xs)) == {BF16}
        assert signature(made, params, xs) == plain
        assert set(dots(autocast(jax.grad(net)), params, xs)) == {BF16}
        got = None if mode in TRACED else made(params, xs)
    if got is not None:
        assert distance(got, reference()) < 2 * CLOSE


@cache
def reference() -> Any:
    """Compute the loss and its gradient without autocast."""
    return jax.jit(jax.value_and_grad(net))(*inputs())


def test_no_tracer_is_left_behind() -> None:
    def small(x: jax.Array) -> jax.Array:
        h, _ = lax.scan(lambda h, _: (jax.nn.softplus(jax.nn.relu(h @ x)), None), x, None, 2)
        return jnp.sum(lax.cond(h[0, 0] > 0, lambda: h * 2.0, lambda: upcast(h)))

    (x,) = arrays((3, 3))
    # JAX collects garbage after each trace, which is slow with the objects of all tests before this one.
    gc.collect()
    gc.freeze()
    try:
        with jax.checking_leaks():
            assert dots(autocast(jax.jit(small)), x) == {BF16: 1}
            assert set(dots(jax.grad(autocast(small)), x)) == {BF16}
    finally:
        gc.unfreeze()


def test_a_precision_for_all_dots_counts_as_asked_for() -> None:
    params, xs = inputs()
    with jax.default_matmul_precision("highest"):
        assert set(dots(autocast(net), params, xs)) == {F32}
    with jax.default_matmul_precision("default"):
        assert set(dots(autocast(net), params, xs)) == {BF16}


@pytest.mark.skipif(
    not hasattr(jax.config, "jax_allow_f16_reductions"), reason="needs JAX 0.9, which looks for such sums"
)
@pytest.mark.parametrize("order", ["grad(autocast)", "autocast(grad)"])
def test_jax_finds_no_sum_in_lower_precision(order: str) -> None:
    def loss(params: dict[str, jax.Array], xs: jax.Array) -> jax.Array:
        h = jax.nn.gelu(xs @ params["w"] + params["b"])
        h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5) * params["b"]
        return -jnp.mean(jax.nn.log_softmax(h @ params["w"] * jnp.sum(h)))

    params, xs = inputs()
    with option("jax_allow_f16_reductions", False):
        made = jax.grad(autocast(loss)) if order == "grad(autocast)" else autocast(jax.grad(loss))
        assert set(dots(made, params, xs)) == {BF16}
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, xs))
        with pytest.raises(Exception, match=r"reduction"):  # by hand, all cast once
            jax.make_jaxpr(jax.grad(loss))(*low)


def test_without_jit_all_is_computed_at_once() -> None:
    params, xs = inputs()
    with jax.disable_jit():
        w, x = params["w"], xs
        assert distance(autocast(lambda w, x: jnp.tanh(x @ w) @ w)(w, x), jnp.tanh(x @ w) @ w) < CLOSE
        assert autocast(lambda w, x: x @ w, outputs="flow")(w, x).dtype == jnp.bfloat16
        got = autocast(net)(params, xs)
    assert distance(got, reference()[0]) < 2 * CLOSE


def test_a_nan_made_inside_is_found_by_debug_nans() -> None:
    (x,) = arrays((3, 3))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="invalid value"):
        jax.block_until_ready(jax.jit(autocast(lambda x: jnp.log(-jnp.abs(x @ x) - 1.0)))(x))


@pytest.mark.parametrize("order", ["checkify(autocast)", "autocast(checkify)"])
def test_checks_inside_report_their_failure(order: str) -> None:
    def checked(x: jax.Array) -> jax.Array:
        y = x @ x
        checkify.check(jnp.sum(y) > 0, "the sum is {s}", s=jnp.sum(y))
        return jnp.log(x[0, 0])

    errors = checkify.user_checks | checkify.nan_checks
    made = checkify.checkify(autocast(checked), errors=errors)
    if order == "autocast(checkify)":
        made = autocast(checkify.checkify(checked, errors=errors))
    jitted = jax.jit(made)
    assert set(dots(jitted, jnp.eye(2))) == {BF16}
    good, out = jitted(jnp.ones((2, 2)))
    assert good.get() is None
    assert out == 0.0
    with pytest.raises(checkify.JaxRuntimeError, match="the sum is -6"):
        jitted(jnp.array([[1.0, 2.0], [-3.0, -2.0]]))[0].throw()
    with pytest.raises(checkify.JaxRuntimeError, match="nan generated by primitive"):
        jitted(jnp.array([[-1.0, 0.0], [0.0, 1.0]]))[0].throw()


def test_debug_prints_and_callbacks_see_what_they_were_traced_for(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def shown(x: jax.Array) -> jax.Array:
        y = x @ x
        jax.debug.print("trace {t}", t=jnp.trace(y))
        jax.debug.callback(lambda y: seen.append(y.dtype.name), y)
        return y

    made = jax.jit(autocast(shown))
    assert dots(made, jnp.eye(2)) == {BF16: 1}
    jax.block_until_ready(made(jnp.eye(2)))
    jax.effects_barrier()
    assert "trace 2.0" in capfd.readouterr().out
    assert seen == ["float32"]


def test_an_exception_in_the_function_passes_and_leaves_nothing_behind() -> None:
    def failing(x: jax.Array) -> jax.Array:
        with disabled():
            raise KeyError("mine")

    (x,) = arrays((3, 3))
    for made in (
        autocast(failing),
        jax.jit(autocast(failing)),
        autocast(lambda x: lax.scan(lambda c, _: failing(c), x, None, 2)),
    ):
        with pytest.raises(KeyError, match="mine"):
            made(x)
    assert dots(autocast(lambda x: x @ x), x) == {BF16: 1}
    assert "bfloat16" not in str(jax.make_jaxpr(lambda x: x @ x)(x))
