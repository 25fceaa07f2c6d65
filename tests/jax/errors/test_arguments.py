"""Arguments and results that are no arrays of JAX, and state that would be lost."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mezzo.errors import ArrayTypeError, MezzoError, MutationError
from mezzo.jax import autocast, disabled
from tests.jax.transforms.seen import BF16, arrays, dots


def first(x: Any, *rest: Any, **more: Any) -> Any:
    return x


class Tensor:
    """What a tensor of another framework looks like from outside."""

    dtype = "float32"
    shape = (2,)


@pytest.mark.parametrize("framework", ["torch", "tensorplay", "tensorflow", "mlx.core"])
def test_an_array_of_another_framework_is_refused(framework: str) -> None:
    kind = type("Tensor", (Tensor,), {"__module__": framework})
    name = framework.split(".")[0]
    with pytest.raises(
        ArrayTypeError, match=rf"argument 0 is a {name}\.Tensor.*Convert it: jnp\.asarray\(x\)"
    ) as caught:
        autocast(first)(kind())
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, MezzoError)


def test_the_place_of_a_wrong_argument_is_named() -> None:
    torch = pytest.importorskip("torch")
    tensor, x = torch.ones(2), jnp.ones(2)
    made = autocast(first)
    with pytest.raises(ArrayTypeError, match=r"^argument 0 is a torch\.Tensor"):
        made(tensor)
    with pytest.raises(ArrayTypeError, match=r"^argument 1\['layers'\]\[1\] is a torch\.Tensor"):
        made(x, {"layers": [x, tensor]})
    with pytest.raises(ArrayTypeError, match=r"^argument mask is a torch\.Tensor"):
        made(x, mask=tensor)
    with pytest.raises(ArrayTypeError, match=r"is a torch\.Parameter|is a torch\.\w+"):
        made(torch.nn.Parameter(tensor))


def test_the_shape_of_an_array_is_none() -> None:
    text = r"argument 1 is a ShapeDtypeStruct, and autocast takes arrays.*jax\.eval_shape\(autocast\(fn\), \.\.\.\)"
    with pytest.raises(ArrayTypeError, match=text):
        autocast(first)(jnp.ones(2), jax.ShapeDtypeStruct((2,), jnp.float32))
    assert jax.eval_shape(autocast(first), jax.ShapeDtypeStruct((2,), jnp.float32)).shape == (2,)


@pytest.mark.parametrize(
    "array",
    [np.array(["a"]), np.array([object()]), np.array(["2020-01-01"], "M8[D]")],
    ids=lambda each: str(each.dtype),
)
def test_numpy_arrays_that_jax_cannot_compute_with_are_refused(array: Any) -> None:
    with pytest.raises(ArrayTypeError, match=r"argument 0 is a NumPy array of .*, which JAX cannot compute with"):
        autocast(first)(array)


@pytest.mark.parametrize("result", ["text", jnp.tanh, object(), {1, 2}], ids=lambda each: type(each).__name__)
def test_a_result_that_is_no_array_is_refused(result: Any) -> None:
    def returns(x: jax.Array) -> Any:
        return {"loss": x, "more": [result]}

    name = type(result).__name__
    text = rf"returns returned a {name} \(result\['more'\]\[0\]\), and autocast, like jax\.jit, returns arrays"
    with pytest.raises(ArrayTypeError, match=text):
        autocast(returns)(jnp.ones(2))


def test_a_wrong_number_of_arguments_is_the_functions_own_error() -> None:
    with pytest.raises(TypeError, match=r"missing 1 required positional argument"):
        autocast(first)()


def test_an_error_of_the_function_itself_comes_through_and_points_at_its_line() -> None:
    def wrong(x: jax.Array) -> jax.Array:
        return x @ jnp.ones((7, 7))

    with pytest.raises(TypeError, match=r"dot_general requires contracting dimensions to have the same shape"):
        autocast(wrong)(jnp.ones((2, 2)))


def test_a_decision_over_a_traced_value_is_jaxs_own_error() -> None:
    def branches(x: jax.Array) -> jax.Array:
        return x if x.sum() > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError):
        autocast(branches)(jnp.ones(2))


# Flax NNX


@pytest.fixture
def nnx() -> ModuleType:
    pytest.importorskip("flax")
    from flax import nnx

    return nnx


HOW = r"nnx\.split\(model, nnx\.Param, \.\.\.\).*copy=True.*has_aux=True.*nnx\.update\(model, params, rest\)"


@pytest.fixture
def counter(nnx: ModuleType) -> Any:
    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.eye(2))
            self.calls = nnx.Variable(jnp.zeros(()))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.calls.value = self.calls.value + 1.0
            return x @ self.w.value

        def look(self, x: jax.Array) -> jax.Array:
            return x @ self.w.value

    return Counter()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_that_is_given_and_changed_is_refused(counter: Any) -> None:
    def forward(model: Any, x: jax.Array) -> jax.Array:
        return model(x)

    with pytest.raises(
        MutationError, match=rf"forward changed the state of a Flax NNX module that it was given.*{HOW}"
    ) as caught:
        autocast(forward)(counter, jnp.ones((2, 2)))
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("around", ["plain", "jit", "scan"])
def test_a_module_that_is_closed_over_and_changed_is_refused(counter: Any, around: str) -> None:
    def forward(x: jax.Array) -> jax.Array:
        if around == "scan":
            return lax.scan(lambda c, x: (c, counter.look(x)), None, x[None])[1] + counter(x)
        return counter(x)

    made = autocast(forward)
    with pytest.raises(
        MutationError, match=rf"forward changed the state of a Flax NNX module that it closes over.*{HOW}"
    ):
        (jax.jit(made) if around == "jit" else made)(jnp.ones((2, 2)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_change_is_not_left_behind_as_a_tracer(counter: Any) -> None:
    with pytest.raises(MutationError):
        autocast(lambda model, x: model(x))(counter, jnp.ones((2, 2)))
    assert not isinstance(counter.calls.value, jax.core.Tracer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_the_error_says_to_do_works(nnx: ModuleType, counter: Any) -> None:
    graph, params, rest = nnx.split(counter, nnx.Param, ...)

    @autocast
    def loss(params: Any, rest: Any, x: jax.Array) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        return model(x).sum(), nnx.state(model, nnx.Not(nnx.Param))

    assert dots(lambda params: loss(params, rest, jnp.ones((2, 2)))[0], params) == {BF16: 1}
    (_, rest), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, rest, jnp.ones((2, 2)))
    assert jax.tree.leaves(gradient)[0].dtype == jnp.float32
    nnx.update(counter, params, rest)
    assert float(counter.calls.value) == 1.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_that_is_only_read_is_fine(counter: Any) -> None:
    (x,) = arrays((2, 2))
    assert dots(lambda x: autocast(lambda model, x: model.look(x))(counter, x), x) == {BF16: 1}
    assert dots(autocast(counter.look), x) == {BF16: 1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_where_autocast_is_off_a_module_may_change(counter: Any) -> None:
    autocast(lambda model, x: model(x), enabled=False)(counter, jnp.ones((2, 2)))
    assert float(counter.calls.value) == 1.0


def test_flax_is_not_imported_for_the_sake_of_the_check() -> None:
    import subprocess

    code = (
        "import sys, jax, numpy as np; from mezzo.jax import autocast;"
        "assert 'bf16' in str(jax.make_jaxpr(autocast(lambda x: x @ x))(np.ones((2, 2), np.float32)));"
        "print([name for name in ('flax', 'torch', 'equinox', 'optax') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_disabled_leaves_no_scope_behind_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), disabled():
        raise ZeroDivisionError
    (x,) = arrays((2, 2))
    assert dots(autocast(lambda x: x @ x), x) == {BF16: 1}


def test_errors_of_jax_name_the_function_and_its_argument() -> None:
    def choose(params: dict[str, jax.Array], /, *, flag: jax.Array) -> jax.Array:
        return params["a"] if flag else params["a b"]

    params = {"a": jnp.ones(2), "a b": jnp.ones(2), "1": jnp.ones(2)}
    text = r"tracing the function choose at .*test_arguments.py:\d+ .*the argument flag"
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"(?s)" + text):
        autocast(choose)(params, flag=jnp.array(1.0))
    with pytest.raises(jax.errors.TracerBoolConversionError, match="the argument params_a_b"):
        autocast(lambda params: 1.0 if params["a b"].sum() else 2.0)(params)


@pytest.mark.parametrize("named", [{"lambda": 1.0}, {"1": 1.0}, {"x_": 1.0, "x": 2.0}, {"": 1.0}], ids=str)
def test_any_name_of_an_argument_will_do(named: dict[str, float]) -> None:
    arrays = {name: jnp.full((2, 2), value) for name, value in named.items()}
    doubled = autocast(lambda x, **others: {name: other @ x for name, other in others.items()})
    assert set(doubled(jnp.eye(2), **({name: array for name, array in arrays.items() if name != "x"}))) == {*named} - {
        "x"
    }
