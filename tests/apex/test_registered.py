"""Functions registered by module and name: ops become rules of O1, anything else is wrapped in place."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.apex import amp
from mezzo.apex.amp import casts, registered
from mezzo.apex.amp.registered import (
    put_back_registrations,
    register_float_function,
    register_half_function,
    register_promote_function,
    take_registrations,
)
from mezzo.errors import AmpError, AmpOptionError

HALF, FLOAT = torch.float16, torch.float32
Register = Callable[[Any, str], None]
registers = pytest.mark.parametrize(
    "register", [register_half_function, register_float_function, register_promote_function]
)


def start() -> casts.Handle:
    return casts.start(["cpu"], HALF, take_registrations())


def library() -> Any:
    made = types.ModuleType("library")
    made.given = lambda *args: tuple(arg.dtype for arg in args)  # type: ignore[attr-defined]
    return made


X = torch.rand(2, 2, 2, generator=torch.Generator().manual_seed(0)) + 0.1

OPS: dict[str, tuple[Register, Any, str, Callable[[], Tensor], torch.dtype]] = {
    "Tensor.bmm": (register_float_function, Tensor, "bmm", lambda: X.half().bmm(X.half()), FLOAT),
    "under its other name": (register_float_function, Tensor, "bmm", lambda: torch.bmm(X.half(), X.half()), FLOAT),
    "einsum": (register_half_function, torch, "einsum", lambda: torch.einsum("bij,bjk->bik", X, X), HALF),
    "sigmoid": (register_float_function, torch, "sigmoid", lambda: torch.sigmoid(X.half()), FLOAT),
    "softmax": (register_float_function, torch, "softmax", lambda: torch.softmax(X.half(), -1), FLOAT),
    "before the list": (register_half_function, torch, "exp", lambda: torch.exp(X), HALF),
    "before the list, F": (register_half_function, F, "softmax", lambda: F.softmax(X, -1), HALF),
    "dunder": (register_float_function, Tensor, "__matmul__", lambda: X.half() @ X.half(), FLOAT),
    "linalg": (register_half_function, torch.linalg, "vecdot", lambda: torch.linalg.vecdot(X, X), HALF),
    "promote": (register_promote_function, torch, "hypot", lambda: torch.hypot(X.half(), X), FLOAT),
}


@pytest.mark.parametrize(("register", "owner", "name", "call", "dtype"), OPS.values(), ids=OPS)
def test_ops_become_rules(
    register: Register, owner: Any, name: str, call: Callable[[], Tensor], dtype: torch.dtype
) -> None:
    before = getattr(owner, name)
    register(owner, name)
    start()
    assert getattr(owner, name) is before
    assert call().dtype is dtype


def test_multinomial_gets_float32() -> None:
    """Its result is of integers, so it shows by what float16 cannot hold: 1e-8 beside 0 is drawn from float32 alone."""
    register_float_function(torch, "multinomial")
    rules = take_registrations()
    assert rules == {"torch.multinomial": "fp32"}
    casts.start(["cpu"], HALF, rules)
    assert torch.multinomial(torch.tensor([0.0, 1.0]).half(), 1).item() == 1


def test_the_ban_on_binary_cross_entropy_is_lifted() -> None:
    """Apex could not: its ban was outermost."""
    register_float_function(F, "binary_cross_entropy")
    start()
    assert F.binary_cross_entropy(torch.full((2,), 0.5).half(), torch.ones(2).half()).dtype is FLOAT


def test_a_composite_is_wrapped_in_place_and_the_op_in_it_keeps_its_rule() -> None:
    before = F.gumbel_softmax
    register_half_function(F, "gumbel_softmax")
    assert F.gumbel_softmax is before
    assert take_registrations() == {}
    assert F.gumbel_softmax is not before
    casts.start(["cpu"], HALF, {})
    assert F.softmax(X.half(), -1).dtype is FLOAT
    x = X.clone().requires_grad_()
    F.gumbel_softmax(x, hard=True).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is FLOAT
    put_back_registrations()
    assert F.gumbel_softmax is before


# Wrapped in place


def test_a_function_of_a_module() -> None:
    own = library()
    before = own.given
    register_half_function(own, "given")
    assert own.given(X) == (FLOAT,)
    start()
    assert own.given(X) == (HALF,)
    casts.stop()
    assert own.given(X) == (FLOAT,)
    put_back_registrations()
    assert own.given is before


@pytest.mark.parametrize(
    ("register", "came", "called"),
    [
        (register_half_function, (FLOAT, HALF), (HALF, HALF)),
        (register_float_function, (FLOAT, HALF), (FLOAT, FLOAT)),
        (register_promote_function, (FLOAT, HALF), (FLOAT, FLOAT)),
        (register_promote_function, (torch.bfloat16, HALF), (FLOAT, FLOAT)),
    ],
)
def test_each_kind_casts_its_way(register: Register, came: Any, called: Any) -> None:
    own = library()
    register(own, "given")
    start()
    assert own.given(*(torch.ones(2, dtype=dtype) for dtype in came)) == called


class Base:
    def inherited(self, x: Tensor) -> Any:
        return type(self), x.dtype


class Own(Base):
    def method(self, x: Tensor) -> Any:
        return type(self), x.dtype

    @classmethod
    def of_class(cls, x: Tensor) -> Any:
        return cls, x.dtype

    @staticmethod
    def static(x: Tensor) -> Any:
        return Own, x.dtype


class Sub(Own):
    pass


@pytest.mark.parametrize("name", ["method", "of_class", "static", "inherited"])
def test_methods_of_all_kinds(name: str) -> None:
    before = dict(vars(Own)), dict(vars(Base))
    register_half_function(Own, name)
    start()
    assert getattr(Own(), name)(X) == (Own, HALF)
    assert getattr(Sub(), name)(X) == (Own if name == "static" else Sub, HALF)
    assert Base().inherited(X) == (Base, FLOAT)
    put_back_registrations()
    assert (dict(vars(Own)), dict(vars(Base))) == before


class Net(nn.Module):
    def forward(self, x: Tensor) -> torch.dtype:
        return x.dtype


def test_the_forward_of_a_class_of_modules() -> None:
    register_float_function(Net, "forward")
    start()
    assert Net()(X.half()) is FLOAT


class Double(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_apply_of_an_autograd_function() -> None:
    register_half_function(Double, "apply")
    start()
    x = torch.ones(2, requires_grad=True)
    output = Double.apply(x)
    assert output.dtype is HALF
    output.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))
    put_back_registrations()
    assert "apply" not in vars(Double)


def test_what_was_replaced_since_stays() -> None:
    own = library()
    register_half_function(own, "given")
    start()
    own.given = replaced = len
    put_back_registrations()
    assert own.given is replaced


# When


def test_registrations_stay_for_the_next_start_and_are_not_wrapped_twice() -> None:
    own = library()
    register_half_function(own, "given")
    register_half_function(torch, "einsum")
    rules = take_registrations()
    placed = own.given
    assert take_registrations() == rules
    assert own.given is placed


def test_where_the_start_failed_functions_are_put_back_and_stay_registered() -> None:
    own = library()
    before = own.given
    register_half_function(own, "given")
    take_registrations()
    registered.give_back_registrations()
    assert own.given is before
    start()
    assert own.given(X) == (HALF,)
    put_back_registrations()
    assert own.given is before


@registers
def test_after_the_start_it_is_too_late(register: Register) -> None:
    own = library()
    registered.close()
    with pytest.raises(AmpError, match=rf"{register.__name__}\(library\.given\) comes after amp\.initialize"):
        register(own, "given")
    registered.reopen()
    register(own, "given")


def test_the_same_registration_once_more_is_fine() -> None:
    own = library()
    register_half_function(own, "given")
    registered.close()
    register_half_function(own, "given")
    with pytest.raises(AmpError, match="comes after"):
        register_float_function(own, "given")


def test_of_two_registrations_the_later_one_counts() -> None:
    own = library()
    register_half_function(own, "given")
    register_float_function(own, "given")
    start()
    assert own.given(X.half()) == (FLOAT,)
    registered.reopen()
    with pytest.raises(AmpError, match="registered with register_float_function already"):
        register_half_function(own, "given")


# What cannot be registered


class Holder:
    __slots__ = ("given",)


WRONG: dict[str, tuple[Any, Any, str]] = {
    "missing": (torch, "eimsum", "no function named eimsum in torch.*einsum"),
    "module by name": ("torch", "einsum", "takes the module, not its name 'torch'"),
    "no name": (torch, len, "must be a string"),
    "class": (nn, "Linear", r"torch\.nn\.Linear is a class"),
    "no function": (torch, "pi", r"torch\.pi is a float"),
    "in place": (Tensor, "add_", "writes into an argument"),
    "method of a model": (
        nn.Linear(2, 2),
        "forward",
        r"decorate its class's method, or register \(Linear, 'forward'\)",
    ),
    "op overload": (torch.ops.aten.mm, "default", "cannot be replaced"),
}


@registers
@pytest.mark.parametrize(("owner", "name", "text"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_registered_is_a_value_error(register: Register, owner: Any, name: Any, text: str) -> None:
    with pytest.raises(AmpOptionError, match=text) as caught:
        register(owner, name)
    assert isinstance(caught.value, ValueError)


def test_fixed_attributes_cannot_be_wrapped() -> None:
    holder = Holder()
    holder.given = len
    with pytest.raises(AmpOptionError, match=r"Holder\.given cannot be replaced"):
        register_half_function(holder, "given")
    register_half_function(dict, "fromkeys")
    with pytest.raises(AmpOptionError, match=r"dict\.fromkeys cannot be replaced"):
        take_registrations()


# init() and its handle


def test_init_takes_registrations_and_casts_to_float16() -> None:
    own = library()
    register_half_function(torch, "einsum")
    register_half_function(own, "given")
    handle = casts.init()
    assert handle.is_active()
    assert torch.einsum("bij,bjk->bik", X, X).dtype is HALF
    assert own.given(X) == (HALF,)
    with pytest.raises(AmpError, match="comes after"):
        register_float_function(torch, "relu")
    handle._clear_cache()
    handle._deactivate()
    handle._deactivate()
    assert not handle.is_active()
    assert own.given(X) == (FLOAT,)
    assert (X @ X).dtype is FLOAT
    register_float_function(torch, "relu")


def test_a_handle_that_is_not_the_last_ends_nothing() -> None:
    first, second = casts.init(), casts.init()
    first._deactivate()
    assert (first.is_active(), second.is_active()) == (False, True)
    assert (X @ X).dtype is HALF


def test_init_can_allow_what_is_banned_and_switch_the_cache_off() -> None:
    casts.init(allow_banned=True, enable_caching=False, verbose=True, loss_scale=128.0)
    assert F.binary_cross_entropy(torch.full((2,), 0.5).half(), torch.ones(2).half()).dtype is FLOAT


def test_init_that_is_not_enabled_does_nothing() -> None:
    handle = casts.init(enabled=False)
    assert not handle.is_active()
    assert (X @ X).dtype is FLOAT
    loss = torch.ones(1, requires_grad=True)
    with handle.scale_loss(loss, None) as scaled:
        assert scaled is loss
    with handle.wrap_optimizer(torch.optim.SGD([loss], lr=1.0)).scale_loss(loss) as scaled:
        assert scaled is loss
    handle._clear_cache()
    handle._deactivate()


def test_the_old_scale_loss_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match=r"Call amp\.scale_loss\(loss, optimizer\) after amp\.initialize"):
        casts.init().scale_loss(torch.ones(1))


def test_a_wrapped_optimizer_is_the_optimizer() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    wrapped = casts.init().wrap_optimizer(optimizer, num_loss=0)
    assert wrapped.param_groups is optimizer.param_groups
    weight.grad = torch.ones(1)
    wrapped.step()
    wrapped.zero_grad()
    assert (weight.item(), weight.grad) == (0.0, None)
    with pytest.raises(AmpError, match="loss 1 since the last step, and the optimizer was wrapped for 0"):
        wrapped.scale_loss(weight).__enter__()


def test_a_wrapped_optimizer_scales_one_loss_after_the_other() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    amp.initialize(net, optimizer, opt_level="O1", num_losses=2, loss_scale=4.0, verbosity=0)
    wrapped = amp._amp_state.handle.wrap_optimizer(optimizer, num_loss=2)
    for _ in range(2):
        for _ in range(2):
            loss = net(torch.ones(1, 2)).float().sum()
            with wrapped.scale_loss(loss) as scaled:
                assert scaled.item() == 4 * loss.item()
                scaled.backward()
        assert torch.equal(net.bias.grad, torch.full((2,), 2.0))
        wrapped.step()
        wrapped.zero_grad()
