"""Casts: the same decisions as the core's pure function, gradients in the inputs' dtypes, and derivatives of any order."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import tensorplay as tp

import mezzo.tensorplay as mt
from mezzo import CastPolicy, Policy
from mezzo.decision import input_dtypes
from mezzo.errors import BannedOpError
from mezzo.tensorplay.actions import action_for
from mezzo.tensorplay.casting import cast
from mezzo.tensorplay.current import CURRENT

LOW = ("bfloat16", "float16")
DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "complex64")
CASTING = (CastPolicy.LOWER_PRECISION_FP, CastPolicy.FP32, CastPolicy.PROMOTE)


def name(tensor: object) -> str:
    return str(tensor.dtype).removeprefix("tensorplay.")  # type: ignore[attr-defined]


def made(dtype: str) -> object:
    return tp.ones(2, dtype=getattr(tp, dtype))


# Decisions


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("rule", CASTING)
def test_each_action_casts_as_the_core_says(rule: CastPolicy, low: str) -> None:
    action = action_for(rule, "op", "cpu", low)
    assert action is not None
    for came in [*((dtype,) for dtype in DTYPES), *itertools.product(DTYPES, repeat=2)]:
        tensors = [made(dtype) for dtype in came]
        used = action(lambda *args: args, tuple(tensors), {})
        assert tuple(map(name, used)) == input_dtypes(rule, came, low)
        untouched = [old is new for old, new in zip(tensors, used, strict=True)]
        assert untouched == [old == new for old, new in zip(came, map(name, used), strict=True)]


def test_lists_and_keywords_are_cast_and_other_values_are_passed_on() -> None:
    action = action_for(CastPolicy.LOWER_PRECISION_FP, "op", "cpu", "bfloat16")
    shape, text = (2, 3), "mean"
    args, kwargs = action(lambda *a, **k: (a, k), ([made("float32"), None], shape, text), {"weight": made("float32")})  # type: ignore[misc]
    assert name(args[0][0]) == name(kwargs["weight"]) == "bfloat16"
    assert args[0][1] is None
    assert args[1] is shape
    assert args[2] is text


def test_a_call_with_out_runs_as_it_came() -> None:
    x, out = tp.ones(2, 2), tp.zeros(2, 2)
    with mt.autocast("cpu"):
        assert tp._C.mm(x, x, out=out) is out
        assert name(tp.mm(x, x)) == "bfloat16"
    assert float(out[0, 0]) == 2.0


def test_tensors_on_another_device_are_left_alone() -> None:
    action = action_for(CastPolicy.LOWER_PRECISION_FP, "op", "cuda", "float16")
    assert action is not None
    x = made("float32")
    assert action(lambda value: value, (x,), {}) is x


def test_a_banned_op_raises_with_advice() -> None:
    policy = Policy(
        "strict", {"binary_cross_entropy": "banned", "exp": "banned_lower_precision"}, framework="tensorplay"
    )
    x = tp.full((2,), 0.5)
    with mt.autocast("cpu", policy=policy):
        with pytest.raises(
            BannedOpError, match=r"binary_cross_entropy is banned .* use binary_cross_entropy_with_logits"
        ):
            tp.nn.functional.binary_cross_entropy(x, x)
        assert name(tp.exp(x)) == "float32"
        with pytest.raises(BannedOpError, match=r"exp is banned for inputs in lower precision"):
            tp.exp(x.bfloat16())
        with mt.autocast("cpu", enabled=False):
            tp.nn.functional.binary_cross_entropy(x, x)


@pytest.mark.parametrize("op", ["max_pool2d", "layer_norm", "index_add_"])
def test_no_repair_gets_around_a_ban(op: str) -> None:
    low, wide = tp.ones(1, 1, 2, 2, dtype=tp.bfloat16), tp.ones(1, 1, 2, 2)
    call = {
        "max_pool2d": lambda x: tp.nn.functional.max_pool2d(x, 2),
        "layer_norm": lambda x: tp.nn.functional.layer_norm(x, (2,), tp.ones(2)),  # low beside float32
        "index_add_": lambda x: (x * 1).index_add_(0, tp.tensor([0]), wide),
    }[op]
    with mt.autocast("cpu", policy=Policy("strict", {op: "banned_lower_precision"}, framework="tensorplay")):
        call(wide)
        with pytest.raises(BannedOpError, match=f"{op} is banned for inputs in lower precision"):
            call(low)


# Where an op is called


def test_every_way_to_call_an_op_comes_by_the_wrapper() -> None:
    x, y = tp.ones(2, 2), tp.ones(2, 2)
    calls = {
        "function": lambda: tp.matmul(x, y),
        "method": lambda: x.matmul(y),
        "operator": lambda: x @ y,
        "extension": lambda: tp._C.matmul(x, y),
        "module": lambda: tp.nn.Linear(2, 2)(x),
        "functional": lambda: tp.nn.functional.linear(x, y),
        "einsum": lambda: tp.einsum("ij,jk->ik", x, y),
        "parameter": lambda: tp.nn.Parameter(x) @ y,
    }
    with mt.autocast("cpu"):
        found = {label: name(call()) for label, call in calls.items()}
    assert found == dict.fromkeys(calls, "bfloat16")


def test_a_function_that_tensorplay_composes_in_python_takes_the_rule_of_the_op_of_its_name() -> None:
    low, weight = tp.ones(2, 2, dtype=tp.bfloat16), tp.ones(3, 2, 2)
    # The product inside is listed too, and is not cast again.
    policy = Policy("mine", {"bilinear": "fp32", "matmul": "lower_precision_fp"}, framework="tensorplay")
    with mt.autocast("cpu", policy=policy):
        assert name(tp.nn.functional.bilinear(low, low, weight)) == "float32"
    with mt.autocast("cpu"):
        assert name(tp.nn.functional.bilinear(low, low, weight)) == "bfloat16"
        assert name(tp.nn.functional.binary_cross_entropy_with_logits(low, low)) == "float32"
        assert name(tp.linalg.matrix_power(low.float(), 2)) == "bfloat16"


def test_the_gradient_of_a_cross_entropy_of_low_logits_is_that_of_float32_ones() -> None:
    """Under TensorPlay's own autocast the softmax inside is low, and the gradient of a sure prediction lost."""
    low = (tp.eye(4) * 9).bfloat16()
    classes = tp.arange(4)

    def gradient(logits: Any) -> Any:
        leaf = logits.detach().requires_grad_()
        with mt.autocast("cpu"):
            tp.nn.functional.cross_entropy(leaf, classes).backward()
        return leaf.grad.float()

    wide = gradient(low.float())
    assert float((gradient(low) - wide).abs().max()) <= 2**-8 * float(wide.abs().max())  # one rounding to bfloat16
    with tp.autocast("cpu"):
        native = low.detach().requires_grad_()
        tp.nn.functional.cross_entropy(native, classes).backward()
    assert float((native.grad.float() - wide).abs().max()) > 0.1 * float(wide.abs().max())


@pytest.mark.parametrize("function", ["matrix_norm", "pinv", "cond"])
def test_linear_algebra_that_looks_at_dtypes_in_python_takes_low_inputs(function: str) -> None:
    low = tp.eye(2, dtype=tp.float32).bfloat16()
    with pytest.raises(NotImplementedError, match=r"only float32/float64|unsupported dtype"):
        getattr(tp.linalg, function)(low)
    with mt.autocast("cpu"):
        found = getattr(tp.linalg, function)(low)
        assert name(found[0] if isinstance(found, tuple) else found) == "float32"


def test_operators_that_a_policy_lists_are_cast() -> None:
    policy = Policy("mine", {"add": "fp32", "pow": "fp32", "mul": "lower_precision_fp"}, framework="tensorplay")
    x = tp.ones(2, dtype=tp.bfloat16)
    with mt.autocast("cpu", policy=policy):
        assert [name(value) for value in (x + 1, 1 + x, x.add(1), tp.add(x, 1))] == ["float32"] * 4
        assert [name(value) for value in (x**2, 2**x, x.pow(2))] == ["float32"] * 3
        assert [name(value) for value in (x.float() * 2, 2 * x.float())] == ["bfloat16"] * 2
        assert name(x - 1) == "bfloat16"


@pytest.mark.parametrize("default", ["fp32", "lower_precision_fp", "promote"])
def test_a_default_for_unlisted_ops_covers_what_computes(default: str) -> None:
    policy = Policy("all", {}, default=default, framework="tensorplay")
    x, low = tp.ones(2), tp.ones(2, dtype=tp.bfloat16)
    with mt.autocast("cpu", policy=policy):
        assert name(tp.relu(low)) == ("float32" if default == "fp32" else "bfloat16")
        assert name(tp.relu(x)) == ("bfloat16" if default == "lower_precision_fp" else "float32")
        target = tp.ones(2)
        target.add_(low)
        assert name(target) == "float32"


# Gradients


@pytest.mark.parametrize("low", LOW)
def test_gradients_come_in_the_dtypes_of_the_inputs(low: str) -> None:
    weight, half = tp.ones(2, 2, requires_grad=True), tp.ones(2, 2, dtype=getattr(tp, low), requires_grad=True)
    with mt.autocast("cpu", getattr(tp, low)):
        (weight @ half).sum().backward()
    assert [name(weight.grad), name(half.grad)] == ["float32", low]


@pytest.mark.parametrize("target", LOW)
def test_a_cast_can_be_differentiated_as_often_as_one_likes(target: str) -> None:
    # The powers of 3 up to the fourth and their multiples here need at most 8 bits, so both dtypes hold them exactly.
    x = tp.tensor([3.0], requires_grad=True)
    value = (cast(x, getattr(tp, target)) ** 4).sum()
    found = []
    for _ in range(3):
        (slope,) = tp.autograd.grad(value, x, create_graph=True)
        found.append((float(slope), name(slope)))
        value = slope.sum()
    assert found == [(108.0, "float32"), (108.0, "float32"), (72.0, "float32")]


def test_a_cast_up_and_down_again_keeps_the_graph() -> None:
    x = tp.tensor([2.0], dtype=tp.bfloat16, requires_grad=True)
    (slope,) = tp.autograd.grad((cast(cast(x, tp.float32), tp.float16) ** 3).sum(), x, create_graph=True)
    assert [name(slope), float(slope)] == ["bfloat16", 12.0]
    assert float(tp.autograd.grad(slope.sum(), x)[0]) == 12.0


def test_a_backward_pass_in_a_region_computes_as_outside() -> None:
    tp.manual_seed(0)
    x, weight, seed = tp.randn(8, 8), tp.randn(8, 8, requires_grad=True), tp.randn(8, 8)
    product = tp.tanh(x @ weight)
    (outside,) = tp.autograd.grad(product, weight, seed, retain_graph=True)
    with mt.autocast("cpu"):
        (inside,) = tp.autograd.grad(product, weight, seed)
    assert bool((inside == outside).all())


def test_without_gradients_nothing_is_recorded() -> None:
    weight = tp.ones(2, 2, requires_grad=True)
    with mt.autocast("cpu"):
        with tp.no_grad():
            assert not (weight @ weight).requires_grad
        with tp.inference_mode():
            assert name(weight @ weight) == "bfloat16"


@pytest.mark.parametrize("region", [mt.autocast, tp.autocast], ids=["mezzo", "native"])
def test_a_cast_by_hand_in_a_disabled_region_keeps_its_graph_too(region: Any) -> None:
    def second_gradient(inner: Any) -> Any:
        tp.manual_seed(0)
        weight, q = tp.randn(6, 6), tp.randn(3, 6).requires_grad_()
        with mt.autocast("cpu"):
            product = q @ weight
            with inner:
                loss = product.float().sin().sum()
        (slope,) = tp.autograd.grad(loss, q, create_graph=True)
        (second,) = tp.autograd.grad(slope.square().sum(), q)
        return second

    found, expected = second_gradient(region("cpu", enabled=False)), second_gradient(mt.autocast("cpu"))
    assert bool((found == expected).all())
    assert float(found.abs().max()) > 0


def test_casts_by_hand_of_other_kinds_work_as_outside() -> None:
    x = tp.tensor([1.0, 2.0], requires_grad=True)
    with mt.autocast("cpu"):
        tp.autograd.grad(x.to(tp.complex64).abs().sum(), x, create_graph=True)
        low = x.bfloat16()
        (slope,) = tp.autograd.grad((low.type_as(x) ** 3).sum(), x, create_graph=True)
        (second,) = tp.autograd.grad(slope.sum(), x)
        mapped = tp.func.vmap(lambda row: (row @ tp.eye(2)).float())(tp.eye(2))
    assert second.tolist() == [6.0, 12.0]
    assert [name(mapped), mapped.tolist()] == ["float32", tp.eye(2).tolist()]


def test_a_class_that_makes_calls_itself_sees_them_as_they_came() -> None:
    seen = []

    class Watching(tp.Tensor):
        @classmethod
        def __tensorplay_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append([name(value) for value in args if isinstance(value, tp.Tensor)])
            return "mine"

    special, plain = tp.ones(2, 2).as_subclass(Watching), tp.ones(2, 2)
    assert tp.mm(special, plain) == "mine"
    with mt.autocast("cpu"):
        assert tp.mm(special, plain) == "mine"
        assert tp.mm(plain, special) == "mine"
        assert name(tp.mm(plain, plain)) == "bfloat16"
    assert seen == [["float32", "float32"]] * 3


def test_a_function_that_is_mapped_over_a_batch_is_cast_too() -> None:
    tp.manual_seed(0)
    batch, weight = tp.randn(3, 4, 4, requires_grad=True), tp.randn(4, 4, requires_grad=True)
    with mt.autocast("cpu"):
        mapped = tp.func.vmap(lambda row: row @ weight)(batch)
        by_hand = batch @ weight
    assert name(mapped) == "bfloat16"
    assert bool((mapped == by_hand).all())
    found = tp.autograd.grad(mapped.float().sum(), (batch, weight))
    expected = tp.autograd.grad(by_hand.float().sum(), (batch, weight))
    assert [name(gradient) for gradient in found] == ["float32", "float32"]
    # Both sum the same products, in another order: one rounding of a sum of twelve numbers in bfloat16.
    assert all(float((a - b).abs().max()) < 2**-6 for a, b in zip(found, expected, strict=True))


# State


def test_an_op_that_raises_leaves_the_state_as_it_was() -> None:
    with mt.autocast("cpu"):
        plan = CURRENT.plan
        with pytest.raises(RuntimeError):
            tp.mm(tp.ones(2, 3), tp.ones(2, 3))
        assert CURRENT.plan is plan
        assert name(tp.ones(2, 2) @ tp.ones(2, 2)) == "bfloat16"


def test_an_error_of_the_caller_comes_as_the_op_raised_it() -> None:
    def message() -> str:
        with pytest.raises(RuntimeError) as caught:
            tp.mm(tp.ones(2, 3), tp.ones(2, 3))
        return str(caught.value)

    outside = message()
    with mt.autocast("cpu"):
        assert message() == outside


def test_threads_in_regions_of_several_dtypes_do_not_see_each_other() -> None:
    wrong: list[str] = []
    x = tp.ones(2, 2)

    def work(dtype: str | None) -> None:
        for _ in range(60):
            if dtype is None:
                found, expected = name(x @ x), "float32"
            else:
                with mt.autocast("cpu", getattr(tp, dtype)):
                    found, expected = name(x @ x), dtype
            if found != expected:
                wrong.append(f"{found} for {expected}")

    threads = [threading.Thread(target=work, args=(dtype,)) for dtype in (*LOW, None) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
