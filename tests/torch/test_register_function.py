"""`register_function`: casts around functions that PyTorch does not list."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import threading
import types
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mezzo import builtin_policy
from mezzo.errors import BannedOpError, PolicyError, UnknownOpError
from mezzo.torch import autocast, register_function, set_precision

LOW = torch.bfloat16


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A foreign attention: one dtype, or none."""
    if not q.dtype == k.dtype == v.dtype:
        msg = f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        raise TypeError(msg)
    return (q @ k.mT).softmax(-1) @ v


@pytest.fixture
def library() -> types.ModuleType:
    module = types.ModuleType("library")
    module.attend = attend  # type: ignore[attr-defined]
    return module


def qkv(*dtypes: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(4, 4).to(dtype) for dtype in dtypes]


MIXED = (torch.bfloat16, torch.float32, torch.float16)


def test_without_a_registration_mixed_tensors_fail(library: Any) -> None:
    with autocast("cpu", dtype=LOW), pytest.raises(TypeError, match="one dtype"):
        library.attend(*qkv(*MIXED))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("region", [autocast, torch.autocast], ids=["mezzo", "torch"])
@pytest.mark.parametrize(
    ("rule", "dtypes", "target"),
    [
        ("lower_precision_fp", MIXED, None),
        ("fp32", MIXED, torch.float32),
        ("promote", MIXED, torch.float32),
        ("promote", (torch.float16,) * 3, torch.float16),
    ],
)
def test_a_registered_function_gets_its_tensors_in_one_dtype(
    library: Any, low: torch.dtype, region: Any, rule: str, dtypes: Any, target: torch.dtype | None
) -> None:
    tensors = qkv(*dtypes)
    register_function(library, "attend", rule)
    with region("cpu", dtype=low):
        got = library.attend(*tensors)
    expected = attend(*(tensor.to(target or low) for tensor in tensors))
    assert got.dtype is (target or low)
    assert torch.equal(got, expected)


def test_gradients_come_back_in_the_dtypes_that_came_in(library: Any) -> None:
    tensors = [tensor.requires_grad_() for tensor in qkv(*MIXED)]
    register_function(library, "attend", "fp32")
    with autocast("cpu", dtype=LOW):
        output = library.attend(*tensors)
    output.square().sum().backward()
    reference = [tensor.detach().float().requires_grad_() for tensor in tensors]
    attend(*reference).square().sum().backward()
    for tensor, other in zip(tensors, reference, strict=True):
        assert tensor.grad.dtype is tensor.dtype
        assert torch.equal(tensor.grad, other.grad.to(tensor.dtype))


def test_autocast_is_off_inside_and_as_it_was_after(library: Any) -> None:
    seen: list[bool] = []
    library.ask = lambda _: seen.append(torch.is_autocast_enabled("cpu"))
    register_function(library, "ask", "fp32")
    with autocast("cpu", dtype=LOW):
        library.ask(torch.ones(1))
        assert torch.is_autocast_enabled("cpu")
        library.fail = lambda _: 1 / 0
        register_function(library, "fail", "fp32")
        with pytest.raises(ZeroDivisionError):
            library.fail(torch.ones(1))
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False]


@pytest.mark.parametrize("region", [lambda: autocast("cpu", enabled=False), lambda: autocast("xpu", dtype=LOW)])
def test_outside_of_a_region_on_its_tensors_device_a_function_is_called_as_it_is(library: Any, region: Any) -> None:
    library.same = lambda x: x
    register_function(library, "same", "lower_precision_fp")
    x = torch.ones(1)
    assert library.same(x) is x
    with region():
        assert library.same(x) is x


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Batch:
    values: Tensor
    name: str


pytree.register_dataclass(Batch)


def test_tensors_in_any_pytree_are_cast_and_other_values_arrive_as_they_are(library: Any) -> None:
    library.same = lambda *args, **kwargs: (args, kwargs)
    register_function(library, "same", "lower_precision_fp")
    x, double, whole = torch.ones(1), torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    meta, cache, unknown = torch.ones(1, device="meta"), {"calls": 0, "mask": whole}, types.SimpleNamespace(x=x)
    with autocast("cpu", dtype=LOW):
        args, kwargs = library.same(Pair(x, [x, double]), Batch(x, "b"), cache, unknown, meta, state={"x": (x, None)})
    pair, batch, same_cache, same_unknown, same_meta = args
    assert pair.left.dtype is pair.right[0].dtype is batch.values.dtype is kwargs["state"]["x"][0].dtype is LOW
    assert type(pair) is Pair
    assert pair.right[1] is double
    assert (type(batch), batch.name) == (Batch, "b")
    assert same_cache is cache
    assert same_unknown is unknown
    assert same_meta is meta


def test_where_the_policy_is_fp32_a_registered_function_is_too(library: Any) -> None:
    register_function(library, "attend", "lower_precision_fp")

    class Layer(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return library.attend(*tensors)

    layer = Layer()
    with autocast("cpu", dtype=LOW, policy="fp32"):
        assert layer(*qkv(*MIXED)).dtype is torch.float32
    set_precision(layer, {"": "fp32"})
    with autocast("cpu", dtype=LOW):
        assert layer(*qkv(*MIXED)).dtype is torch.float32
        assert library.attend(*qkv(*MIXED)).dtype is LOW


def test_a_weight_is_cast_once_per_region(library: Any) -> None:
    seen: list[Tensor] = []
    library.note = seen.append
    register_function(library, "note", "lower_precision_fp")
    weight = nn.Parameter(torch.ones(2))
    with autocast("cpu", dtype=LOW):
        library.note(weight)
        library.note(weight)
        with torch.no_grad():
            weight.add_(1)
        library.note(weight)
    assert seen[0] is seen[1]
    assert torch.equal(seen[2], torch.full((2,), 2, dtype=LOW))


def test_a_banned_function_raises_in_regions_only(library: Any) -> None:
    register_function(library, "attend", "banned")
    library.attend(*qkv(torch.float32, torch.float32, torch.float32))
    message = (
        "library.attend is banned in autocast regions. Call it in a region with enabled=False, or register it with another "
        "cast policy."
    )
    with autocast("cpu"), pytest.raises(BannedOpError, match=f"^{re.escape(message)}$"):
        library.attend(*qkv(torch.float32, torch.float32, torch.float32))


# Removal


def test_remove_puts_the_function_back(library: Any) -> None:
    registration = register_function(library, "attend", "fp32")
    assert library.attend.__wrapped__ is attend
    assert library.attend.__doc__ == attend.__doc__
    taken = library.attend
    registration.remove()
    assert library.attend is attend
    registration.remove()
    with autocast("cpu", dtype=LOW), pytest.raises(TypeError, match="one dtype"):
        taken(*qkv(*MIXED))
    with register_function(library, "attend", "fp32"):
        assert library.attend is not attend
    assert library.attend is attend


def test_remove_leaves_what_others_have_put_there(library: Any) -> None:
    registration = register_function(library, "attend", "fp32")
    inner = library.attend
    library.attend = functools.partial(inner)
    others = library.attend
    registration.remove()
    assert library.attend is others
    with autocast("cpu", dtype=LOW), pytest.raises(TypeError, match="one dtype"):
        library.attend(*qkv(*MIXED))


def test_all_threads_see_a_registration_and_each_its_own_region(library: Any) -> None:
    register_function(library, "attend", "lower_precision_fp")
    dtypes: list[torch.dtype] = []

    def run() -> None:
        dtypes.append(library.attend(*qkv(*[torch.float32] * 3)).dtype)
        with autocast("cpu", dtype=torch.float16):
            dtypes.append(library.attend(*qkv(*MIXED)).dtype)

    with autocast("cpu", dtype=LOW):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert dtypes == [torch.float32, torch.float16]


# As a decorator


@register_function(cast_policy="fp32")
def energy(x: Tensor) -> Tensor:
    """Square and sum."""
    return x.square().sum()


def test_a_decorated_function_is_cast_until_its_registration_is_removed() -> None:
    decorated = register_function(cast_policy="fp32")(energy.__wrapped__)
    x = torch.ones(2, dtype=LOW)
    assert decorated.__name__ == "energy"
    with autocast("cpu", dtype=LOW):
        assert decorated(x).dtype is torch.float32
        decorated.registration.remove()
        assert decorated(x).dtype is LOW
        assert energy(x).dtype is torch.float32
    assert repr(decorated.registration) == "Registration('energy', 'fp32', removed)"


def test_a_model_that_holds_a_decorated_function_copies_and_pickles() -> None:
    import pickle

    net = nn.Module()
    net.function = energy
    assert copy.deepcopy(net).function is energy
    assert pickle.loads(pickle.dumps(energy)) is energy


def test_a_decorated_method_gets_its_self() -> None:
    class Layer(nn.Module):
        @register_function(cast_policy="fp32")
        def forward(self, x: Tensor) -> Tensor:
            return x * 1

    with autocast("cpu", dtype=LOW):
        assert Layer()(torch.ones(1, dtype=LOW)).dtype is torch.float32


# Errors


@pytest.mark.parametrize(
    ("name", "rule", "error", "message"),
    [
        ("atend", "fp32", UnknownOpError, "library.atend does not exist. Did you mean 'attend'?"),
        (
            "attend",
            "fp32_set_opt_dtype",
            PolicyError,
            "'fp32_set_opt_dtype' is a rule for ops, not for functions; allowed are lower_precision_fp, fp32, promote",
        ),
        ("attend", "low", PolicyError, "'low' is not a cast policy; allowed are"),
        ("attend", None, PolicyError, "None is not a cast policy; allowed are"),
        (3, "fp32", TypeError, "register_function: the name of the attribute must be a string, got 3."),
        ("number", "fp32", TypeError, "library.number is a int, and register_function takes functions."),
        (
            "Kernels",
            "fp32",
            TypeError,
            "library.Kernels is a class, and register_function takes functions; name one of",
        ),
        (
            "steps",
            "fp32",
            TypeError,
            "library.steps does its work after the call, as a generator or coroutine; register",
        ),
        (
            "op",
            "fp32",
            PolicyError,
            "library.op is an op, so a policy can name it: policy.override({'aten::softmax.int': 'fp32'}).",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_registered_is_an_error(
    library: Any, name: Any, rule: Any, error: type[Exception], message: str
) -> None:
    def steps(x: Tensor) -> Iterator[Tensor]:
        yield x

    library.number, library.Kernels, library.steps, library.op = 3, Batch, steps, torch.ops.aten.softmax.int
    before = dict(vars(library))
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        register_function(library, name, rule)
    assert vars(library) == before


def test_a_second_registration_is_an_error(library: Any) -> None:
    register_function(library, "attend", "fp32")
    message = "library.attend is registered already, as 'fp32'; call remove() on that registration first."
    with pytest.raises(PolicyError, match=f"^{re.escape(message)}$"):
        register_function(library, "attend", "lower_precision_fp")


@pytest.mark.parametrize(
    ("owner", "name", "shown"),
    [
        (torch, "mm", "torch.mm"),
        (Tensor, "matmul", "Tensor.matmul"),
        (nn.functional, "softmax", "torch.nn.functional.softmax"),
        (torch.linalg, "norm", "torch.linalg.norm"),
    ],
    ids=str,
)
def test_an_op_is_ruled_by_a_policy(owner: Any, name: str, shown: str) -> None:
    before = getattr(owner, name)
    message = f"{shown} is an op of PyTorch's, so a policy rules it: policy.override({{{shown!r}: 'fp32'}})."
    with pytest.raises(PolicyError, match=f"^{re.escape(message)}$"):
        register_function(owner, name, "fp32")
    assert getattr(owner, name) is before
    builtin_policy("default").override({shown: "fp32"})


def test_an_op_that_no_policy_can_cast_is_refused_too() -> None:
    with pytest.raises(
        PolicyError, match=r"^Tensor\.addmm_ is an op of PyTorch's, which a policy rules: .* writes into an"
    ):
        register_function(Tensor, "addmm_", "fp32")


def test_an_op_under_a_name_in_somebody_elses_module_can_be_registered(library: Any) -> None:
    library.mm = torch.mm
    with register_function(library, "mm", "fp32"), autocast("cpu", dtype=LOW):
        assert library.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is LOW


def test_the_name_of_a_module_is_no_module() -> None:
    message = (
        "register_function takes the module, not its name 'flashlib': import it, and call "
        "register_function(flashlib, 'attn', 'fp32')."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        register_function("flashlib", "attn", "fp32")


def test_a_module_is_not_rewritten() -> None:
    linear = nn.Linear(2, 2)
    message = (
        "Linear.forward is a method of a torch.nn.Module, which is not rewritten; use set_precision for its forward."
    )
    with pytest.raises(PolicyError, match=f"^{re.escape(message)}$"):
        register_function(linear, "forward", "fp32")
    assert "forward" not in vars(linear)


def test_arguments_that_are_missing_or_of_the_wrong_kind_are_errors(library: Any) -> None:
    message = (
        "register_function takes (module, name, cast_policy), or only cast_policy= as a decorator: "
        "@register_function(cast_policy='lower_precision_fp')."
    )
    for arguments in ((attend,), (library, "attend"), ()):
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            register_function(*arguments)
    with pytest.raises(
        TypeError, match=r"^register_function decorates functions, got int; put it under @staticmethod\.$"
    ):
        register_function(cast_policy="fp32")(3)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"^object\.x cannot be replaced: object objects have fixed attributes\.$"):
        register_function(object(), "x", "fp32")
