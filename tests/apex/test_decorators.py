"""`half_function`, `float_function` and `promote_function` cast what a function is given, while O1 is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import mezzo.torch
from mezzo.apex.amp import casts
from mezzo.apex.amp.registered import float_function, half_function, promote_function
from mezzo.errors import AmpTypeError

HALF, FLOAT, BRAIN, DOUBLE = torch.float16, torch.float32, torch.bfloat16, torch.float64
decorators = pytest.mark.parametrize("decorator", [half_function, float_function, promote_function])
low_dtypes = pytest.mark.parametrize("low", [HALF, BRAIN], ids=str)


def start(low: torch.dtype = HALF) -> casts.Handle:
    return casts.start(["cpu"], low, {})


def dtypes(value: Any) -> Any:
    """Put dtypes in the place of tensors."""
    if isinstance(value, Tensor):
        return value.dtype
    if isinstance(value, list | tuple):
        made = [dtypes(one) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return {key: dtypes(one) for key, one in value.items()} if isinstance(value, dict) else value


def given(*args: Any, **kwargs: Any) -> Any:
    """Say what came."""
    return dtypes((*args, *kwargs.values()))


def ones(*of: torch.dtype) -> list[Tensor]:
    return [torch.ones(2, dtype=dtype) for dtype in of]


# The casts


@low_dtypes
def test_half_function_casts_positional_and_keyword_arguments(low: torch.dtype) -> None:
    start(low)
    x, y = ones(FLOAT, FLOAT)
    assert half_function(given)(x, key=y) == (low, low)


def test_float_function_casts_to_float32() -> None:
    start()
    assert float_function(given)(*ones(HALF, BRAIN, FLOAT)) == (FLOAT,) * 3


@pytest.mark.parametrize(
    ("came", "called"),
    [
        ((HALF, FLOAT), FLOAT),
        ((BRAIN, HALF), FLOAT),
        ((HALF, HALF), HALF),
        ((BRAIN, BRAIN), BRAIN),
        ((FLOAT, FLOAT), FLOAT),
    ],
    ids=str,
)
@low_dtypes
def test_promote_function_casts_to_the_widest(
    low: torch.dtype, came: tuple[torch.dtype, ...], called: torch.dtype
) -> None:
    start(low)
    assert promote_function(given)(*ones(*came)) == (called, called)


@decorators
def test_float64_is_left_alone(decorator: Callable[..., Any]) -> None:
    """Apex cast it down, or raised NotImplementedError."""
    start()
    double, other = ones(DOUBLE, HALF)
    assert decorator(given)(double, [double, double]) == (DOUBLE, [DOUBLE, DOUBLE])
    assert decorator(given)(double, other)[0] is DOUBLE


def test_lists_and_tuples_of_floating_tensors_are_cast() -> None:
    class Pair(NamedTuple):
        first: Tensor
        second: Tensor

    start()
    x, y = ones(FLOAT, FLOAT)
    assert half_function(given)([x, y], (x, [y]), Pair(x, y)) == ([HALF, HALF], (HALF, [HALF]), Pair(HALF, HALF))
    assert promote_function(given)([x.half(), y]) == ([FLOAT, FLOAT],)


@decorators
def test_all_else_is_untouched(decorator: Callable[..., Any]) -> None:
    start()
    index, flags, (x,) = torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool), ones(FLOAT)
    others = (None, 3, "text", [], index, flags, {"x": x}, [x, None], [x, index], {1, 2})
    for value, came in zip(others, decorator(lambda *args: args)(*others), strict=True):
        assert came is value


def test_a_list_in_which_nothing_is_cast_is_the_same_list() -> None:
    start()
    given_list = ones(HALF, HALF)
    assert half_function(lambda values: values)(given_list) is given_list


@low_dtypes
def test_gradients_come_back_in_the_dtype_that_came(low: torch.dtype) -> None:
    start(low)
    x, weight = torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(2))
    product = half_function(torch.mul)(x, weight)
    assert product.dtype is low
    product.sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (FLOAT, FLOAT)
    assert torch.equal(weight.grad, torch.ones(2))


def test_tensors_elsewhere_are_left_alone() -> None:
    start()
    assert half_function(given)(torch.ones(2, device="meta")) == (FLOAT,)


# When they do nothing


@decorators
def test_nothing_is_cast_without_o1_and_where_casts_are_disabled(decorator: Callable[..., Any]) -> None:
    came = (HALF, FLOAT, BRAIN)
    function = decorator(given)
    assert function(*ones(*came)) == came
    start()
    assert function(*ones(*came)) != came
    with casts.disable_casts():
        assert function(*ones(*came)) == came
        with casts.without_casts():
            assert function(*ones(*came)) == came
    with torch.autocast("cpu", enabled=False):
        assert function(*ones(*came)) == came
        with casts.without_casts():
            assert function(*ones(*came)) == came
    casts.stop()
    assert function(*ones(*came)) == came


def test_in_a_thread_that_is_not_in_nothing_is_cast() -> None:
    from concurrent.futures import ThreadPoolExecutor

    start()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(half_function(given), *ones(FLOAT)).result() == (FLOAT,)


def test_in_backward_passes_and_steps_they_cast_as_with_apex() -> None:
    start()
    with casts.without_casts():
        assert float_function(given)(*ones(HALF)) == (FLOAT,)
        assert half_function(given)(*ones(FLOAT)) == (HALF,)
        with torch.autocast("cpu", enabled=False):
            assert half_function(given)(*ones(FLOAT)) == (FLOAT,)


def test_in_a_region_of_the_users_they_follow_it() -> None:
    start(HALF)
    with torch.autocast("cpu", dtype=BRAIN):
        assert half_function(given)(*ones(FLOAT)) == (BRAIN,)
    with mezzo.torch.autocast("cpu", dtype=HALF, policy="fp32"):
        assert half_function(given)(*ones(HALF)) == (FLOAT,)


# What they are put on


@decorators
def test_name_docs_and_signature_are_kept(decorator: Callable[..., Any]) -> None:
    import inspect

    @decorator
    def attend(q: Tensor, k: Tensor) -> Tensor:
        """Docs."""
        return q @ k

    assert (attend.__name__, attend.__doc__) == ("attend", "Docs.")
    assert list(inspect.signature(attend).parameters) == ["q", "k"]


def test_on_the_forward_of_a_module_its_weights_are_cast_by_the_ops_in_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        @half_function
        def forward(self, x: Tensor) -> tuple[Tensor, torch.dtype]:
            return self.inner(x), x.dtype

    net = Net()
    start()
    output, came = net(torch.ones(1, 2))
    assert (output.dtype, came) == (HALF, HALF)
    output.sum().backward()
    assert net.inner.weight.grad.dtype is FLOAT


def test_casts_stay_on_in_a_float_function() -> None:
    start()
    assert float_function(torch.mm)(torch.ones(2, 2).half(), torch.ones(2, 2).half()).dtype is HALF


@pytest.mark.parametrize("decorator_first", [True, False])
def test_on_the_forward_of_an_autograd_function(decorator_first: bool) -> None:
    seen: list[torch.dtype] = []

    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        seen.append(x.dtype)
        ctx.scale = scale
        return x * scale

    placed: Any = half_function(staticmethod(forward)) if decorator_first else staticmethod(half_function(forward))

    class Scale(torch.autograd.Function):
        @staticmethod
        @float_function
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            seen.append(grad.dtype)
            return grad * ctx.scale, None

    Scale.forward = placed
    start()
    x = torch.ones(2, requires_grad=True)
    output = Scale.apply(x, 3.0)
    with casts.without_casts():
        output.sum().backward()
    assert (output.dtype, seen) == (HALF, [HALF, FLOAT])
    assert torch.equal(x.grad, torch.full((2,), 3.0))


def test_methods_of_all_kinds() -> None:
    class Kinds:
        @half_function
        def method(self, x: Tensor) -> Any:
            return type(self), x.dtype

        @half_function
        @classmethod
        def of_class(cls, x: Tensor) -> Any:
            return cls, x.dtype

        @half_function
        @staticmethod
        def static(x: Tensor) -> Any:
            return x.dtype

    start()
    (x,) = ones(FLOAT)
    assert Kinds().method(x) == Kinds.of_class(x) == (Kinds, HALF)
    assert Kinds.static(x) is Kinds().static(x) is HALF


@decorators
@pytest.mark.parametrize(("wrong", "text"), [(nn.Linear, "the class Linear"), (3, "got 3")])
def test_classes_and_other_objects_are_refused(decorator: Callable[..., Any], wrong: Any, text: str) -> None:
    with pytest.raises(AmpTypeError, match=text):
        decorator(wrong)


def test_a_checkpointed_function_is_cast_when_it_runs_again() -> None:
    from torch.utils.checkpoint import checkpoint

    seen: list[torch.dtype] = []

    @half_function
    def part(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x * x  # keeps x, so the backward pass asks for it

    x = torch.ones(2, requires_grad=True)
    start()
    inside = checkpoint(part, x, use_reentrant=False)
    with casts.disable_casts():
        disabled = checkpoint(part, x, use_reentrant=False)
    with casts.without_casts():
        inside.sum().backward()
        disabled.sum().backward()
    assert seen == [HALF, FLOAT, HALF, FLOAT]
