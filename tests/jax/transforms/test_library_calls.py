"""Calls of jax.numpy, jax.nn, jax.lax, jax.scipy and jax.random on a low activation: never an error, the same types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.core import check_jaxpr  # public since JAX 0.10

from mezzo.jax import autocast

from .seen import BF16, F16, arrays, dots, signature

Fn = Callable[..., Any]

IDS = jnp.array([2, 0, 1])
KEY = jax.random.key(0)

CALLS: dict[str, Fn] = {
    **{
        name: getattr(jnp, name)
        for name in """abs angle arccosh arcsinh arctan argmax argmin argsort atleast_3d average cbrt ceil conj corrcoef
        cos cosh count_nonzero cov cumprod cumsum deg2rad diag diagonal diff ediff1d exp exp2 expm1 flip floor frexp
        gradient i0 imag isfinite isnan log1p logical_not max mean median min modf nan_to_num nanmax nanmean nanstd negative
        ones_like positive prod ptp rad2deg ravel real reciprocal rint rot90 round sign signbit sin sinc sinh sort
        spacing sqrt square squeeze std sum tan tanh trace transpose tril triu trunc var zeros_like""".split()
        if hasattr(jnp, name)
    },
    **{
        f"nn.{name}": getattr(jax.nn, name)
        for name in """relu relu6 sigmoid softplus sparse_plus soft_sign silu log_sigmoid leaky_relu hard_sigmoid hard_silu
        hard_tanh elu celu selu gelu squareplus mish logsumexp log_softmax softmax standardize""".split()
    },
    **{
        f"special.{n}": getattr(jax.scipy.special, n)
        for n in "erf erfc erfinv expit i0e i1e ndtr digamma gammaln log_ndtr".split()
    },
    "glu": lambda y: jax.nn.glu(y[:, :2]),
    "gelu exact": lambda y: jax.nn.gelu(y, approximate=False),
    "one_hot": lambda y: jax.nn.one_hot(jnp.argmax(y, 0), 4) @ jnp.ones((4, 3)),
    "logsumexp of weights": lambda y: jax.nn.logsumexp(y, axis=1, b=jnp.abs(y)),
    "softmax where": lambda y: jax.nn.softmax(y, where=y > 0, axis=0),
    "sort of several": lambda y: lax.sort((y, jnp.exp(y), jnp.broadcast_to(IDS, y.shape)), num_keys=2),
    "top_k": lambda y: lax.top_k(y, 2),
    "approx_max_k": lambda y: lax.approx_max_k(y, 2),
    "barrier": lambda y: lax.optimization_barrier((y, jnp.exp(y), IDS)),
    "clamp": lambda y: lax.clamp(jnp.float32(-1), y, jnp.exp(y)),
    "select of three": lambda y: lax.select_n(IDS, y[0], jnp.exp(y[1]), y[2]),
    "pieces": lambda y: jnp.split(y, 3),
    "piecewise": lambda y: jnp.piecewise(y, [y < 0, y >= 0], [lambda v: -v, jnp.exp]),
    "select": lambda y: jnp.select([y < 0, y > 1], [y, jnp.exp(y)], 0.5),
    "interp": lambda y: jnp.interp(y, jnp.arange(3.0), jnp.exp(jnp.arange(3.0))),
    "quantile": lambda y: jnp.quantile(y, 0.3, axis=0),
    "histogram": lambda y: jnp.histogram(y, bins=3),
    "searchsorted": lambda y: jnp.searchsorted(jnp.arange(3.0), y),
    "digitize": lambda y: jnp.digitize(y, jnp.arange(3.0)),
    "unique": lambda y: jnp.unique(y, size=3),
    "nonzero": lambda y: jnp.nonzero(y, size=3),
    "bincount": lambda y: jnp.bincount(IDS, weights=y[0], length=3),
    "convolve": lambda y: jnp.convolve(y[0], y[1]),
    "polyfit": lambda y: jnp.polyval(y[0], y),
    "cross": lambda y: jnp.cross(y, y[::-1]),
    "kron": lambda y: jnp.kron(y, y),
    "outer": lambda y: jnp.outer(y[0], y[1]),
    "power": lambda y: jnp.power(jnp.abs(y), y),
    "integer power": lambda y: y**5,
    "float power": lambda y: jnp.abs(y) ** 1.5,
    "square root by power": lambda y: jnp.abs(y) ** 0.5,
    "divmod": lambda y: jnp.divmod(y, 0.7),
    "remainder": lambda y: jnp.remainder(y, jnp.exp(y)),
    "hypot": lambda y: jnp.hypot(y, y.T),
    "arctan2": lambda y: jnp.arctan2(y, jnp.exp(y)),
    "copysign": lambda y: jnp.copysign(y, y.T),
    "ldexp": lambda y: jnp.ldexp(y, IDS),
    "heaviside": lambda y: jnp.heaviside(y, 0.5),
    "isclose": lambda y: jnp.isclose(y, y + 1e-9),
    "where of floats": lambda y: jnp.where(y, y, -y),
    "meshgrid": lambda y: jnp.meshgrid(y[0], y[1]),
    "tile": lambda y: jnp.tile(y, (2, 1)),
    "repeat": lambda y: jnp.repeat(y, 2, axis=0),
    "insert": lambda y: jnp.insert(y, 1, 2.0, axis=0),
    "delete": lambda y: jnp.delete(y, 1, axis=0),
    "choose": lambda y: jnp.choose(IDS, [y[0], y[1], jnp.exp(y[2])], mode="clip"),
    "take": lambda y: jnp.take(y, IDS, axis=1, mode="fill", fill_value=jnp.nan),
    "get with a fill value": lambda y: y.at[IDS + 1].get(mode="fill", fill_value=-1e9),
    "set": lambda y: y.at[IDS].set(jnp.exp(y)),
    "set by a number": lambda y: y.at[0].set(1e9),
    "add": lambda y: y.at[:, IDS].add(jnp.exp(y)),
    "multiply": lambda y: y.at[IDS].multiply(2.0),
    "min": lambda y: y.at[IDS].min(0.0),
    "apply": lambda y: y.at[IDS].apply(jnp.tanh),
    "segment_sum": lambda y: jax.ops.segment_sum(y, IDS, 3),
    "segment_max": lambda y: jax.ops.segment_max(y, IDS, 3),
    "conv": lambda y: lax.conv(y[None, None], y[None, None], (1, 1), "SAME"),
    "conv transposed": lambda y: lax.conv_transpose(y[None, :, :, None], y[:, :, None, None], (1, 1), "SAME"),
    "average pool": lambda y: lax.reduce_window(y, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
    "max pool and gradient": jax.grad(lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (2, 2), (1, 1), "VALID").sum()),
    "patches": lambda y: lax.conv_general_dilated_patches(y[None, None], (2, 2), (1, 1), "VALID"),
    "resize": lambda y: jax.image.resize(y, (5, 4), "bilinear"),
    "map_coordinates": lambda y: jax.scipy.ndimage.map_coordinates(y, [y[0], y[1]], order=1),
    "inverse": jnp.linalg.inv,
    "norm": jnp.linalg.norm,
    "slogdet": jnp.linalg.slogdet,
    "pinv": jnp.linalg.pinv,
    "lstsq": lambda y: jnp.linalg.lstsq(y, y[0])[0],
    "matrix_power": lambda y: jnp.linalg.matrix_power(y, 3),
    "expm": jax.scipy.linalg.expm,
    "multi_dot": lambda y: jnp.linalg.multi_dot([y, y, y]),
    "logpdf": jax.scipy.stats.norm.logpdf,
    "gammainc": lambda y: jax.scipy.special.gammainc(jnp.abs(y) + 1.0, jnp.abs(y)),
    "xlogy": lambda y: jax.scipy.special.xlogy(jnp.abs(y), jnp.abs(y)),
    "categorical": lambda y: jax.random.categorical(KEY, y),
    "choice": lambda y: jax.random.choice(KEY, y, (2,), p=jax.nn.softmax(y[0])),
    "gamma": lambda y: jax.random.gamma(KEY, jnp.abs(y) + 1.0),
    "truncated normal": lambda y: jax.random.truncated_normal(KEY, -1.0, jnp.abs(y)),
    "shuffle": lambda y: jax.random.permutation(KEY, y),
    "vectorized": lambda y: jnp.vectorize(lambda a, b: a @ b, signature="(n),(n)->()")(y, y),
    "apply_along_axis": lambda y: jnp.apply_along_axis(jnp.sum, 0, y),
    "reduced by a function": lambda y: lax.reduce(y, jnp.float32(0), lambda a, b: jnp.maximum(a, b * 1.0), (1,)),
    "bits": lambda y: y.view(jnp.int32),
    "cast to integers": lambda y: jnp.floor(y).astype(jnp.int32),
    "cast to bool": lambda y: y.astype(bool),
    "cast to half": lambda y: y.astype(jnp.float16) + y.astype(jnp.bfloat16),
    "comparison of casts": lambda y: jnp.exp(y) > y,
    "empty": lambda y: jnp.concatenate([y[:0], y]).sum(0) + y[:0].sum(0),
    "clip of gradients": lambda y: jax.lax.clamp(-1.0, y / jnp.maximum(1.0, jnp.linalg.norm(y)), 1.0),
    "custom_gradient": jax.custom_gradient(lambda y: (y * 2.0, lambda ct: ct * 3.0)),
    "eval of a jaxpr": lambda y: jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(jnp.sin)(y))(y),
    "linear_call": lambda y: jax.custom_derivatives.linear_call(lambda _, v: v * 2.0, lambda _, v: v * 2.0, (), y),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated.*:DeprecationWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_the_types_that_it_has_without_autocast(name: str) -> None:
    def plain(x: jax.Array) -> Any:
        return CALLS[name](x @ x), x @ x

    (x,) = arrays((3, 3))
    expected = signature(plain, x)
    for low in (BF16, F16):
        made = autocast(plain, dtype=low[0])
        assert low in dots(made, x)
        assert signature(made, x) == expected
    check_jaxpr(jax.make_jaxpr(autocast(plain))(x).jaxpr)
