"""An autocast function has the signature, pytrees, dtypes and weak types of the function itself."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mezzo.jax import autocast

from .seen import BF16, F16, F32, arrays, distance, dots, of, signature


def net(w: jax.Array, x: jax.Array, *, scale: float = 2.0) -> jax.Array:
    """A layer."""
    return x @ w * scale


def test_name_documentation_and_signature_are_those_of_the_function() -> None:
    for made in (autocast(net), autocast(dtype="float16")(net), autocast(net, enabled=False)):
        assert made.__wrapped__ is net  # type: ignore[attr-defined]
        assert (made.__name__, made.__doc__, made.__module__) == (net.__name__, net.__doc__, net.__module__)
        assert inspect.signature(made) == inspect.signature(net)


@pytest.mark.parametrize(
    ("given", "low"),
    [("bfloat16", BF16), ("float16", F16), (jnp.bfloat16, BF16), (jnp.float16, F16), (np.dtype("float16"), F16)],
    ids=str,
)
def test_the_dtype_may_be_a_name_or_a_dtype(given: Any, low: tuple[str, ...]) -> None:
    w, x = arrays((3, 3), (2, 3))
    assert dots(autocast(net, given), w, x) == {low: 1}
    assert dots(autocast(net, dtype=given), w, x) == {low: 1}


def test_the_decorator_works_with_and_without_arguments_and_on_methods() -> None:
    class Layer:
        def __init__(self) -> None:
            (self.w,) = arrays((3, 3))

        @autocast
        def bare(self, x: jax.Array) -> jax.Array:
            return x @ self.w

        @autocast(dtype="float16", outputs="flow")
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.bare(x) @ self.w

        @classmethod
        @autocast
        def squared(cls, x: jax.Array) -> jax.Array:
            return x @ x

        @staticmethod
        @autocast
        def cubed(x: jax.Array) -> jax.Array:
            return x @ x @ x

    layer = Layer()
    (x,) = arrays((3, 3))
    assert dots(layer.bare, x) == {BF16: 1}
    assert dots(layer, x) == {BF16: 1, F16: 1}
    assert dots(Layer.squared, x) == {BF16: 1}
    assert dots(layer.cubed, x) == {BF16: 2}


def test_any_callable_can_be_wrapped() -> None:
    w, x = arrays((3, 3), (2, 3))

    class Called:
        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ w

    for made in (partial(net, w, scale=1.0), jax.jit(partial(net, w)), Called(), jax.vmap(lambda row: row @ w)):
        assert dots(autocast(made), x) == {BF16: 1}


class Pair(NamedTuple):
    left: jax.Array
    right: Any


@jax.tree_util.register_dataclass
@dataclass
class State:
    params: dict[str, jax.Array]
    step: jax.Array


def test_pytrees_of_all_kinds_go_in_and_come_out() -> None:
    def update(state: State, pair: Pair, rows: list[Any], *rest: Any, flag: bool, **more: jax.Array) -> dict[str, Any]:
        assert flag is True
        assert rows[1] is None
        y = pair.left @ state.params["w"] + rows[0]
        return {
            "state": State({"w": state.params["w"] - y.mean()}, state.step + 1),
            "pair": Pair(y, (pair.right, None)),
            "empty": [],
            "rest": rest,
            "more": more,
        }

    w, x, b, extra = arrays((3, 3), (2, 3), (3,), (4,))
    args = (
        State({"w": w}, jnp.int32(4)),
        Pair(x, jnp.array([True, False])),
        [b, None],
        extra,
        extra.astype(jnp.bfloat16),
    )
    plain = partial(update, flag=True, ids=jnp.arange(2))
    made = partial(autocast(update), flag=True, ids=jnp.arange(2))
    assert dots(made, *args) == {BF16: 1}
    assert signature(made, *args) == signature(plain, *args)
    got = made(*args)
    assert type(got["pair"]) is Pair
    assert type(got["state"]) is State
    assert int(got["state"].step) == 5
    assert got["rest"][1].dtype == jnp.bfloat16
    assert distance(got["pair"].left, x @ w + b) < 1e-2


def test_leaves_that_are_no_arrays_reach_the_function_as_they_are() -> None:
    marker = object()
    seen: list[Any] = []

    def look(x: jax.Array, *others: Any, **named: Any) -> jax.Array:
        seen.append((others, named))
        return x @ x

    (x,) = arrays((2, 2))
    given = (True, 3, 2.5, "text", jnp.tanh, marker, None, 1j)
    assert dots(lambda x: autocast(look)(x, *given, options={"training": False, "fn": net}), x) == {BF16: 1}
    others, named = seen[-1]
    assert all(one is other for one, other in zip(others, given, strict=True))
    assert named == {"options": {"training": False, "fn": net}}


def test_numpy_arrays_and_scalars_are_traced() -> None:
    seen: list[Any] = []

    def look(a: Any, b: Any, c: Any) -> Any:
        seen.append([isinstance(each, jax.core.Tracer) for each in (a, b, c)])
        return a @ a * b, c

    made = autocast(look)
    a, b, c = np.ones((2, 2)), np.float32(3), np.arange(3)
    for given in (a.astype(np.float32), a):
        seen.clear()
        # NumPy makes float64 where nothing is said; without enable_x64 it is float32 to JAX.
        assert dots(lambda given=given: made(given, b, c)) == {BF16: 1}
        assert set(map(tuple, seen)) == {(True, True, True)}
        got = made(given, b, c)
        assert got[0].dtype == jnp.float32
        assert got[0].tolist() == [[6.0, 6.0], [6.0, 6.0]]
        assert [leaf.dtype.name for leaf in jax.jit(made)(given, b, c)] == ["float32", "int32"]


def test_numpys_float64_without_jit() -> None:
    # JAX without enable_x64 takes it as float32, and so does autocast; also where a literal is the only other operand.
    got = autocast(lambda a: (a * 2.0, a @ a, jnp.exp(a) + 1.0))(np.ones((2, 2)))
    assert [each.dtype.name for each in got] == ["float32"] * 3
    assert got[0].tolist() == got[1].tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_an_object_that_stands_for_an_array_is_taken_as_one() -> None:
    class Wrapper:
        def __init__(self, array: jax.Array) -> None:
            self.array = array

        def __jax_array__(self) -> jax.Array:
            return self.array

    w, x = arrays((3, 3), (2, 3))
    assert dots(lambda w, x: autocast(lambda w, x: jnp.matmul(x, w))(Wrapper(w), x), w, x) == {BF16: 1}
    assert distance(autocast(lambda w, x: jnp.matmul(x, w))(Wrapper(w), x), x @ w) < 1e-2


def test_an_equinox_module_goes_in_with_its_static_leaves() -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    (x,) = arrays((3,))
    made = autocast(lambda model, x: model(x))
    assert dots(lambda x: made(model, x), x) == {BF16: 2}
    grad = eqx.filter_grad(lambda model, x: jnp.sum(made(model, x)))
    assert dots(lambda x: jax.tree.leaves(eqx.filter(grad(model, x), eqx.is_array)), x)[BF16] >= 3


@pytest.mark.parametrize("value", [1, 2.0, True, 3j], ids=str)
def test_results_that_are_constants(value: Any) -> None:
    def constant(x: jax.Array) -> Any:
        return value, x @ x, jnp.full(2, value), np.asarray(value)

    (x,) = arrays((2, 2))
    assert signature(autocast(constant), x) == signature(constant, x)
    assert dots(autocast(constant), x) == {BF16: 1}
    got = jax.jit(autocast(constant))(x)
    assert got[0] == got[3] == value


def test_weak_types_of_results_are_those_of_the_function() -> None:
    def mixed(x: jax.Array, weak: jax.Array) -> Any:
        chosen = jax.lax.cond(x[0, 0] > 0, lambda: 1.0, lambda: 2.0)
        return weak * 2.0, x @ x * weak, jnp.sin(weak), jax.jit(jnp.cos)(weak), chosen, weak, jnp.where(x > 0, 1.0, 0.0)

    (x,) = arrays((2, 2))
    weak = jax.jit(lambda: 1.5)()
    assert weak.weak_type
    expected = signature(mixed, x, weak)
    assert [kind for _, _, kind in expected] == [True, False, True, True, True, True, True]
    assert signature(autocast(mixed), x, weak) == expected
    assert dots(autocast(mixed), x, weak) == {BF16: 1}


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ("traced", ["float32", "float32", "bfloat16", "int32", "bool"]),
        ("flow", ["bfloat16", "float32", "bfloat16", "int32", "bool"]),
        ("float32", ["float32", "float32", "float32", "int32", "bool"]),
    ],
)
def test_dtypes_of_results_on_request(outputs: Any, expected: list[str]) -> None:
    def several(x: jax.Array, stored: jax.Array) -> Any:
        y = x @ x
        return y, jnp.exp(y), stored * 2.0, jnp.argmax(y), y > 0

    (x,) = arrays((2, 2))
    made = autocast(several, outputs=outputs)
    assert [leaf.dtype.name for leaf in jax.eval_shape(made, x, x.astype(jnp.bfloat16))] == expected
    got = jax.jit(made)(x, x.astype(jnp.bfloat16))
    assert [leaf.dtype.name for leaf in got] == expected


def test_low_weights_give_a_low_loss_unless_asked() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(x @ w))

    w, x = (each.astype(jnp.bfloat16) for each in arrays((3, 3), (2, 3)))
    assert jax.eval_shape(autocast(loss), w, x).dtype == jnp.bfloat16
    assert jax.eval_shape(autocast(loss, outputs="float32"), w, x).dtype == jnp.float32
    # Inside, sums and squares are float32 all the same.
    assert of("reduce_sum", autocast(loss), w, x) == [F32[:2]]
    assert of("square", autocast(loss), w, x) == [F32[:2]]


def test_without_a_float_nothing_changes() -> None:
    def integers(x: jax.Array, flag: jax.Array) -> Any:
        return x @ x, ~flag, jnp.cumsum(x), jnp.sort(x)

    x, flag = jnp.arange(4).reshape(2, 2), jnp.array(True)
    assert str(jax.make_jaxpr(autocast(integers))(x, flag)) == str(jax.make_jaxpr(integers)(x, flag))


def test_arrays_without_elements() -> None:
    made = autocast(lambda x: (x @ x.T, jnp.sum(x @ x.T, 0), jnp.mean(x.T @ x)))
    x = jnp.zeros((0, 3))
    assert dots(made, x) == {BF16: 3}
    assert [leaf.shape for leaf in made(x)] == [(0, 0), (0,), ()]


def test_a_sparse_matrix_is_a_pytree_of_arrays() -> None:
    sparse = pytest.importorskip("jax.experimental.sparse")
    (x,) = arrays((3, 3))
    matrix = sparse.BCOO.fromdense(jnp.eye(3))
    made = autocast(lambda matrix, x: matrix @ (x @ x))
    assert dots(made, matrix, x)[BF16] == 1
    assert distance(jax.jit(made)(matrix, x), x @ x) < 2e-2


def test_a_function_without_arrays_or_without_results() -> None:
    assert autocast(lambda: None)() is None
    assert autocast(lambda x: ())(jnp.ones(2)) == ()
    assert autocast(lambda n: n * 2)(3) == 6
    got = autocast(lambda: jnp.ones((2, 2)) @ jnp.ones((2, 2)))()
    assert got.tolist() == [[2.0, 2.0], [2.0, 2.0]]
