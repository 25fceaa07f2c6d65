"""The tables for JAX against the installed JAX: its primitives, what they accept, and what functions are traced as."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, primitives

from mezzo.decision import CastPolicy
from mezzo.tables import device_table
from mezzo.vocabulary import vocabulary

# Without what `register_primitive` teaches the one that is shared.
words = vocabulary.__wrapped__("jax")

# In a process of its own, since it imports every module of JAX. Modules that need a package or a device that is not here
# raise at import. Primitives of Pallas and Mosaic, but for those that call a kernel, occur in bodies of
# kernels only, which no autocast sees.
FIND = """
import importlib, json, pkgutil, sys, warnings
warnings.simplefilter("ignore")
import jax, jax._src, jax.experimental
from jax.extend.core import Primitive

KERNELS = ("pallas", "mosaic")

def inside(package):
    for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not any(word in found.name for word in (*KERNELS, "test", ".tools", ".lib", "jax2tf")):
            try:
                module = importlib.import_module(found.name)
            except Exception:
                continue
            if found.ispkg:
                inside(module)

inside(jax._src)
inside(jax.experimental)
names = {}
for module in list(sys.modules.values()):
    where = getattr(module, "__name__", "")
    if where.startswith("jax") and not any(word in where for word in KERNELS):
        for value in list(vars(module).values()):
            if isinstance(value, Primitive):
                names.setdefault(value.name, where)
print(json.dumps(names))
"""


def test_every_primitive_of_the_installed_jax_is_listed() -> None:
    done = subprocess.run([sys.executable, "-c", FIND], capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout)
    assert len(found) > 200, "the search is broken"
    missing = {name: where for name, where in found.items() if name not in {*words.traits, *words.aliases}}
    assert missing == {}


def test_every_public_primitive_is_listed() -> None:
    public = {value.name for value in vars(primitives).values() if isinstance(value, jax.extend.core.Primitive)}
    assert len(public) > 150
    assert public - set(words.traits) == set()


# What a trait or a rule says, seen on primitives

LOW, FULL = jnp.ones((4, 4), jnp.bfloat16), jnp.ones((4, 4), jnp.float32)


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in bodies(equation):
            yield from equations(inner)


def bodies(equation: JaxprEqn) -> Iterator[Jaxpr]:
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            body = getattr(part, "jaxpr", part)
            if hasattr(body, "eqns"):
                yield body


def traced(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Give the primitives of a function that have to do with floats and neither move them nor enter other primitives."""
    found: dict[str, None] = {}
    for equation in equations(jax.make_jaxpr(function)(*arguments).jaxpr):
        name = equation.primitive.name
        dtypes = [getattr(value.aval, "dtype", None) for value in [*equation.invars, *equation.outvars]]
        floats = any(dtype is not None and jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)
        if floats and not words.traits[name] & {"moves", "enters"} and name not in {"iota", "empty"}:
            found[name] = None
    return list(found)


SAME_DTYPES = {
    "add": lax.add_p.bind,
    "mul": lax.mul_p.bind,
    "max": lax.max_p.bind,
    "lt": lax.lt_p.bind,
    "select_n": lambda a, b: lax.select_n_p.bind(a > 0, a, b),
    "clamp": lambda a, b: lax.clamp_p.bind(a, b, b),
    "concatenate": lambda a, b: lax.concatenate_p.bind(a, b, dimension=0),
    "dynamic_update_slice": lambda a, b: lax.dynamic_update_slice_p.bind(a, b, jnp.int32(0), jnp.int32(0)),
}


@pytest.mark.parametrize("name", SAME_DTYPES)
def test_a_primitive_that_promotes_or_follows_takes_operands_of_one_dtype_only(name: str) -> None:
    rule = device_table("xla", "jax")[name]
    assert rule is CastPolicy.PROMOTE or "follows" in words.traits[name]
    jax.eval_shape(SAME_DTYPES[name], LOW, LOW)
    with pytest.raises(TypeError):
        jax.eval_shape(SAME_DTYPES[name], LOW, FULL)


INDEPENDENT = {
    "sort": lambda a, b: lax.sort((a, b), num_keys=1),
    "optimization_barrier": lambda a, b: lax.optimization_barrier((a, b)),
    "psum": jax.vmap(lambda x, y: lax.psum((x, y), "i"), axis_name="i"),
    "pmax": jax.vmap(lambda x, y: lax.pmax((x, y), "i"), axis_name="i"),
    "device_put": lambda a, b: tuple(jax.device_put((a, b))),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_an_independent_primitive_gives_each_operand_its_dtype_back(name: str) -> None:
    assert "independent" in words.traits[name]
    assert [out.dtype for out in jax.eval_shape(INDEPENDENT[name], LOW, FULL)] == [jnp.bfloat16, jnp.float32]


MOVES = {
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x, (2, 2, 3)),
    "reshape": lambda x: x.reshape(6),
    "squeeze": lambda x: lax.squeeze(x[None], (0,)),
    "transpose": lambda x: x.T,
    "slice": lambda x: lax.slice(x, (0, 1), (2, 3)),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (0, 1), (1, 2)),
    "rev": lambda x: lax.rev(x, (0,)),
    "copy": jnp.copy,
    "split": lambda x: lax.split(x, [1, 2], axis=1)[0],
    "name": lambda x: checkpoint_name(x, "x"),
    "optimization_barrier": lax.optimization_barrier,
}


@pytest.mark.parametrize("name", MOVES)
def test_what_moves_elements_makes_no_new_ones_and_takes_any_dtype(name: str) -> None:
    x = jnp.asarray(np.arange(6.0).reshape(2, 3), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(MOVES[name])(x).jaxpr
    assert name in {equation.primitive.name for equation in equations(jaxpr)}
    assert "moves" in words.traits[name]
    out = MOVES[name](x)
    assert out.dtype == jnp.bfloat16
    assert set(np.asarray(out, np.float32).ravel()) <= set(range(6))


@pytest.mark.parametrize(
    "call",
    [
        jnp.linalg.cholesky,
        jnp.linalg.qr,
        jnp.linalg.svd,
        jnp.linalg.eigh,
        jnp.fft.rfft,
        lax.linalg.lu,
    ],
)
def test_linear_algebra_and_fft_have_no_kernels_for_low_precision(call: Callable[..., Any]) -> None:
    """Why they have the rule fp32. The error's type differs: by the dtype check, or by the lowering."""
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=r"(?i)bfloat16|bf16|unsupported"):
        jax.block_until_ready(call(LOW))


def with_rule(body: Callable[..., Any]) -> Callable[..., Any]:
    function = jax.custom_vjp(body)
    function.defvjp(lambda x: (body(x), x), lambda x, g: (g * x,))
    return function


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("jit", jax.jit(jnp.sin)),
        ("remat2", jax.checkpoint(jnp.sin)),
        ("scan", lambda x: lax.scan(lambda c, row: (c + row.sum(), row), 0.0, x)),
        ("while", lambda x: lax.while_loop(lambda v: v[0, 0] < 9, lambda v: v + 1, x)),
        ("cond", lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)),
        ("custom_jvp_call", jax.nn.relu),
        ("custom_vjp_call", with_rule(jnp.sin)),
        ("reduce", lambda x: lax.reduce(x, 0.0, lambda a, b: a * b + a, (0,))),
        ("pure_callback", lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)),
        (
            "custom_linear_solve",
            lambda x: lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, b: b / 2, symmetric=True),
        ),
    ],
)
def test_what_holds_other_primitives_is_entered_or_fixed(name: str, function: Callable[..., Any]) -> None:
    """By the name that the tables use: another release of JAX may have another."""
    found = {
        words.resolve(equation.primitive.name)[0]: equation
        for equation in equations(jax.make_jaxpr(function)(FULL).jaxpr)
    }
    assert name in found
    assert words.traits[name] & {"enters", "fixed"}
    for held, equation in found.items():
        assert words.traits[held] & {"enters", "fixed"} or not list(bodies(equation)), held


# What functions are traced as

ROW = jnp.ones(4)
IMAGE, KERNEL = jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 2, 2))
ALIASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "jnp.matmul": (jnp.matmul, (FULL, FULL)),
    "jnp.einsum": (lambda a, b: jnp.einsum("ij,jk", a, b), (FULL, FULL)),
    "jnp.tensordot": (jnp.tensordot, (FULL, FULL)),
    "jnp.vdot": (jnp.vdot, (ROW, ROW)),
    "jnp.inner": (jnp.inner, (ROW, ROW)),
    "jnp.outer": (jnp.outer, (ROW, ROW)),
    "jnp.convolve": (jnp.convolve, (ROW, ROW)),
    "lax.conv": (lambda a, b: lax.conv(a, b, (1, 1), "SAME"), (IMAGE, KERNEL)),
    "lax.ragged_dot": (lax.ragged_dot, (FULL, jnp.ones((2, 4, 4)), jnp.array([2, 2]))),
    "jax.nn.sigmoid": (jax.nn.sigmoid, (FULL,)),
    "jnp.sum": (jnp.sum, (FULL,)),
    "jnp.max": (jnp.max, (FULL,)),
    "jnp.maximum": (jnp.maximum, (FULL, FULL)),
    "jnp.where": (lambda a, b: jnp.where(a > 0, a, b), (FULL, FULL)),
    "jnp.power": (jnp.power, (FULL, FULL)),
    "jnp.reciprocal": (jnp.reciprocal, (FULL,)),
    "jnp.arctan2": (jnp.arctan2, (FULL, FULL)),
    "jnp.absolute": (jnp.absolute, (FULL,)),
    "jnp.take": (lambda a: jnp.take(a, jnp.array([1]), axis=0), (FULL,)),
    "jnp.argsort": (jnp.argsort, (FULL,)),
    "jnp.fft.irfft": (jnp.fft.rfft, (FULL,)),
    "jsp.special.gammaln": (jsp.gammaln, (FULL,)),
    "jsp.special.betainc": (jsp.betainc, (FULL, FULL, FULL)),
    "jsp.special.erfinv": (jsp.erfinv, (FULL,)),
    "lax.approx_max_k": (lambda a: lax.approx_max_k(a, 2), (FULL,)),
    "lax.dynamic_update_slice_in_dim": (lambda a: lax.dynamic_update_slice_in_dim(a, a[:1], 0, 0), (FULL,)),
}


@pytest.mark.parametrize("name", ALIASES)
def test_a_function_is_traced_as_the_primitive_that_its_name_stands_for(name: str) -> None:
    function, arguments = ALIASES[name]
    assert set(words.resolve(name)) <= set(traced(function, *arguments))


QUERY = jnp.ones((1, 4, 1, 4))
COMPOSED: dict[str, tuple[Callable[..., Any], ...]] = {
    "softmax": (jax.nn.softmax,),
    "log_softmax": (jax.nn.log_softmax,),
    "logsumexp": (jax.nn.logsumexp,),
    "gelu": (jax.nn.gelu, lambda x: jax.nn.gelu(x, approximate=False)),
    "relu": (jax.nn.relu,),
    "silu": (jax.nn.silu,),
    "glu": (jax.nn.glu,),
    "softplus": (jax.nn.softplus,),
    "log_sigmoid": (jax.nn.log_sigmoid,),
    "mish": (jax.nn.mish,),
    "elu": (jax.nn.elu,),
    "celu": (jax.nn.celu,),
    "leaky_relu": (jax.nn.leaky_relu,),
    "hard_swish": (jax.nn.hard_swish,),
    "squareplus": (jax.nn.squareplus,),
    "standardize": (jax.nn.standardize,),
    "mean": (jnp.mean,),
    "var": (jnp.var,),
    "std": (jnp.std,),
    "norm": (jnp.linalg.norm,),
    "logaddexp": (lambda x: jnp.logaddexp(x, x),),
    "log2": (jnp.log2,),
    "remainder": (lambda x: jnp.remainder(x, x),),
    "hypot": (lambda x: jnp.hypot(x, x),),
    "clip": (lambda x: jnp.clip(x, 0.0, 1.0),),
    "logit": (jsp.logit,),
    "xlogy": (lambda x: jsp.xlogy(x, x),),
    "i0": (jsp.i0,),
    "inv": (jnp.linalg.inv,),
    "slogdet": (jnp.linalg.slogdet,),
    "dot_product_attention": (lambda x: jax.nn.dot_product_attention(QUERY * x[0, 0], QUERY, QUERY),),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_a_composition_is_traced_as_the_parts_that_are_told(name: str) -> None:
    found = {primitive for function in COMPOSED[name] for primitive in traced(function, FULL)}
    assert set(words.inside(name)) <= found
    untold = {op for op in found - set(words.inside(name)) if device_table("xla", "jax")[op] is CastPolicy.FP32}
    assert untold == set(), "a part that is computed in float32 has to be told"
