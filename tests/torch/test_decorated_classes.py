"""Decorated classes: they stay classes, and the methods that a reader expects run in the region."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo.torch
from mezzo.torch import autocast

FULL = torch.float32


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@autocast("cpu", dtype=torch.bfloat16, policy="unified")
class Net(nn.Module):
    """A decorated module, old style of ``super`` included."""

    def __init__(self) -> None:
        super(Net, self).__init__()  # noqa: UP008 - as older code has it
        self.linear = nn.Linear(4, 4)
        self.made_in = product()

    def forward(self, x: Tensor) -> Tensor:
        """Say so."""
        return self.linear(x).softmax(-1)

    def other(self) -> torch.dtype:
        return product()


class Longer(Net):
    """A subclass whose own code is not decorated."""

    def forward(self, x: Tensor) -> tuple[Tensor, torch.dtype]:
        return super().forward(x), product()


def test_a_decorated_module_class_runs_forward_in_the_region_and_stays_a_class() -> None:
    net, x = Net(), torch.rand(2, 4)
    with autocast("cpu", dtype=torch.bfloat16, policy="unified"):
        expected = net.linear(x).softmax(-1)
    assert torch.equal(net(x), expected)
    assert expected.dtype is FULL
    assert not torch.equal(net(x), net.linear(x).softmax(-1))
    assert isinstance(Net, type)
    assert isinstance(net, Net)
    assert (net.made_in, net.other()) == (FULL, FULL)
    assert Net.forward.__doc__ == "Say so."


def test_what_a_subclass_puts_in_place_of_forward_is_not_decorated() -> None:
    output, dtype = Longer()(torch.rand(2, 4))
    assert output.dtype is FULL
    assert output.grad_fn is not None
    assert dtype is FULL


def test_decorated_modules_can_be_copied_and_pickled() -> None:
    net, x = Net(), torch.rand(2, 4)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(twin) is Net
        assert torch.equal(twin(x), net(x))


def test_a_forward_that_is_inherited_runs_in_the_region_and_the_base_is_left_alone() -> None:
    class Base(nn.Module):
        def forward(self) -> list[Any]:
            return ["base", product()]

    class Mixin(Base):
        def forward(self) -> list[Any]:
            return ["mixin", product(), *super().forward()]

    @autocast("cpu", dtype=torch.bfloat16)
    class Derived(Base):
        pass

    class Both(Derived, Mixin):
        pass

    assert Derived()() == ["base", torch.bfloat16]
    assert Both()() == ["mixin", torch.bfloat16, "base", torch.bfloat16]
    assert Base()() == ["base", FULL]


def test_a_decorated_class_is_constructed_in_the_region_and_stays_a_class() -> None:
    @autocast("cpu", dtype=torch.bfloat16)
    class Made:
        def __new__(cls, *args: Any) -> Made:  # noqa: ARG004
            made = super().__new__(cls)
            made.new = product()
            return made

        def __init__(self, x: int) -> None:
            self.x, self.init = x, product()

        def later(self) -> torch.dtype:
            return product()

    class Derived(Made):
        def __init__(self) -> None:
            self.before = product()
            super().__init__(5)

    made, derived = Made(3), Derived()
    assert isinstance(made, Made)
    assert isinstance(derived, Made)
    assert (made.x, made.new, made.init, made.later()) == (3, torch.bfloat16, torch.bfloat16, FULL)
    assert (derived.x, derived.before, derived.new, derived.init) == (5, FULL, torch.bfloat16, torch.bfloat16)


def test_constructors_that_cooperate_are_all_called() -> None:
    class Base:
        def __init__(self) -> None:
            self.base = product()

    class Other(Base):
        def __init__(self) -> None:
            super().__init__()
            self.other = product()

    @autocast("cpu", dtype=torch.bfloat16)
    class Decorated(Base):
        pass

    class Both(Decorated, Other):
        pass

    both = Both()
    assert (both.base, both.other) == (torch.bfloat16, torch.bfloat16)
    assert Other().other is FULL


def test_a_class_that_is_defined_already_is_refused_and_stays_as_it_was() -> None:
    before = dict(vars(nn.Linear))
    with pytest.raises(TypeError) as caught:
        autocast("cpu")(nn.Linear)
    assert str(caught.value) == (
        "Linear is defined already, and decorating it would change it for all who use it. Put autocast over the definition "
        "of the class or of a subclass, or decorate the function that makes or calls it."
    )
    assert dict(vars(nn.Linear)) == before


def test_a_class_may_be_defined_again_under_a_name_that_is_taken() -> None:
    """As it is when the cell of a notebook is run a second time."""
    again = type("Net", (nn.Module,), {"forward": lambda self: product(), "__module__": __name__})
    assert autocast("cpu", dtype=torch.bfloat16)(again) is again
    assert again()() is torch.bfloat16


def test_a_class_with_nothing_to_decorate_is_refused() -> None:
    class Empty:
        def step(self) -> None: ...

    class Blocks(nn.ModuleList):
        pass

    for region in (autocast("cpu"), mezzo.torch.autocast("cpu", policy="fp32")):
        with pytest.raises(TypeError) as caught:
            region(Empty)
        assert str(caught.value) == (
            "autocast has nothing to run in the region in the class Empty, which has no __new__ and no __init__ written in "
            "Python. Decorate its methods one by one."
        )
        with pytest.raises(TypeError, match="class Blocks, which has no forward written in Python"):
            region(Blocks)


def test_an_autograd_function_is_refused_and_told_of_custom_fwd() -> None:
    class Double(torch.autograd.Function):
        pass

    with pytest.raises(TypeError) as caught:
        autocast("cpu")(Double)
    assert str(caught.value) == (
        "autocast cannot decorate Double, a torch.autograd.Function: no instance of it is made. Decorate its forward with "
        "mezzo.torch.custom_fwd and its backward with mezzo.torch.custom_bwd."
    )
