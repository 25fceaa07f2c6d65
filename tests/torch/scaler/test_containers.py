"""What `scale` takes and gives back: any container of tensors, in its own shape."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import GradScaler

from .runs import each_class, make_scaler


class Losses(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output:
    loss: Any
    extra: Any


@dataclass(frozen=True)
class FrozenOutput:
    loss: Tensor


class Registered:
    """A container that only PyTorch's registry of pytrees knows how to open."""

    def __init__(self, loss: Tensor, name: str) -> None:
        self.loss, self.name = loss, name


torch.utils._pytree.register_pytree_node(
    Registered, lambda one: ([one.loss], one.name), lambda values, name: Registered(*values, name)
)


def loss(value: float = 3.0) -> Tensor:
    return torch.tensor(value)


def scaled(outputs: Any) -> Any:
    return make_scaler("mezzo", init_scale=8.0).scale(outputs)


@each_class
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.tensor(3.0), torch.float32),
        (torch.tensor([3.0], dtype=torch.float16), torch.float16),
        (torch.tensor(3.0, dtype=torch.float16), torch.float32),
        (torch.tensor(3.0, dtype=torch.float64), torch.float64),
        (torch.tensor([3.0], dtype=torch.bfloat16), torch.bfloat16),
        (torch.tensor(3), torch.float32),
        (torch.tensor(3 + 0j, dtype=torch.complex64), torch.complex64),
    ],
    ids=["float32", "float16 [1]", "float16", "float64", "bfloat16 [1]", "int64", "complex64"],
)
def test_the_dtype_of_what_comes_back_is_the_one_of_pytorch(
    scaler_class: type, value: Tensor, dtype: torch.dtype
) -> None:
    result = make_scaler(scaler_class, init_scale=8.0).scale(value)
    assert result.dtype is dtype
    assert result.shape == value.shape
    assert result.sum().item() == 24.0


@each_class
def test_scaling_is_seen_by_autograd(scaler_class: type) -> None:
    weight = nn.Parameter(torch.ones(3))
    scaler = make_scaler(scaler_class, init_scale=8.0)
    first, (second,) = scaler.scale([weight.sum(), (2 * weight.sum(),)])
    torch.autograd.backward([first, second])
    assert weight.grad.tolist() == [24.0] * 3


@each_class
@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_and_tuples(scaler_class: type, kind: type) -> None:
    result = make_scaler(scaler_class, init_scale=8.0).scale(kind([loss(1), [loss(2), (loss(3),)]]))
    assert type(result) is kind
    assert type(result[1]) is list
    assert type(result[1][1]) is tuple
    assert (result[0], result[1][0], result[1][1][0]) == (8.0, 16.0, 24.0)


@each_class
def test_a_subclass_of_list_keeps_its_class(scaler_class: type) -> None:
    class Bag(list):
        pass

    result = make_scaler(scaler_class, init_scale=8.0).scale(Bag([loss()]))
    assert type(result) is Bag
    assert result == [24.0]


@each_class
@pytest.mark.parametrize("kind", [iter, lambda values: {*values}, collections.deque], ids=["iterator", "set", "deque"])
def test_other_iterables_give_an_iterator(scaler_class: type, kind: Any) -> None:
    result = make_scaler(scaler_class, init_scale=8.0).scale(kind([loss(1), loss(2)]))
    assert sorted(value.item() for value in result) == [8.0, 16.0]


@each_class
def test_a_generator_is_drawn_from_one_by_one(scaler_class: type) -> None:
    drawn = []

    def losses() -> Iterator[Tensor]:
        for number in (1, 2):
            drawn.append(number)
            yield loss(number)

    result = make_scaler(scaler_class, init_scale=8.0).scale(losses())
    assert drawn == []
    assert next(result).item() == 8.0
    assert drawn == [1]
    assert next(result).item() == 16.0
    with pytest.raises(StopIteration):
        next(result)


@each_class
def test_an_empty_list_starts_nothing(scaler_class: type) -> None:
    scaler = make_scaler(scaler_class)
    assert scaler.scale([]) == []
    with pytest.raises(AssertionError, match="Attempted update but _scale is None"):
        scaler.update()


def test_a_namedtuple() -> None:
    result = scaled(Losses(loss(1), Losses(loss(2), [loss(3)])))
    assert type(result) is Losses
    assert type(result.second) is Losses
    assert (result.first, result.second.first, result.second.second) == (8.0, 16.0, [24.0])


def test_named_tuples_of_pytorch() -> None:
    given = torch.max(torch.tensor([[1.0, 2.0]]), dim=1)
    result = scaled(given)
    assert type(result) is type(given)
    assert (result.values.item(), result.indices.item()) == (16.0, 8.0)


MAPPINGS = {
    "dict": {"b": loss(1), "a": loss(2)},
    "OrderedDict": collections.OrderedDict([("b", loss(1)), ("a", loss(2))]),
    "defaultdict": collections.defaultdict(list, {"b": loss(1), "a": loss(2)}),
}


@pytest.mark.parametrize("given", MAPPINGS.values(), ids=MAPPINGS.keys())
def test_mappings_keep_class_keys_and_order(given: Any) -> None:
    result = scaled(given)
    assert type(result) is type(given)
    assert list(result.items()) == [("b", 8.0), ("a", 16.0)]
    assert list(given.items()) == [("b", 1.0), ("a", 2.0)]
    if isinstance(given, collections.defaultdict):
        assert result.default_factory is list


def test_a_mapping_that_cannot_be_made_anew_still_is_a_mapping() -> None:
    result = scaled(MappingProxyType({"a": loss()}))
    assert isinstance(result, Mapping)
    assert dict(result) == {"a": 24.0}


@pytest.mark.parametrize("number", [3, "text"], ids=repr)
@pytest.mark.parametrize("wrap", [lambda leaf: {"a": loss(), "b": leaf}, lambda leaf: Output(loss(), leaf)])
def test_a_leaf_that_is_no_tensor_is_refused_in_any_container(number: Any, wrap: Any) -> None:
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaled(wrap(number))


def test_text_is_refused_and_not_taken_apart() -> None:
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaled("loss")


def test_dataclasses() -> None:
    given = Output(loss(1), {"a": FrozenOutput(loss(2))})
    result = scaled(given)
    assert (type(result), type(result.extra["a"])) == (Output, FrozenOutput)
    assert (result.loss, result.extra["a"].loss) == (8.0, 16.0)
    assert (given.loss, given.extra["a"].loss) == (1.0, 2.0)


def test_a_class_of_a_container_is_no_container() -> None:
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaled(Output)


def test_a_registered_pytree() -> None:
    result = scaled([Registered(loss(), "name")])
    assert type(result[0]) is Registered
    assert (result[0].loss, result[0].name) == (24.0, "name")


def test_containers_within_containers_are_seen_by_autograd() -> None:
    weight = nn.Parameter(torch.ones(2))
    scaler = GradScaler("cpu", init_scale=8.0)
    result = scaler.scale({"a": [Output(weight.sum(), Losses(weight.sum(), (weight.sum(),)))]})
    output = result["a"][0]
    (output.loss + output.extra.first + output.extra.second[0]).backward()
    assert weight.grad.tolist() == [24.0, 24.0]
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.step(optimizer)
    assert weight.tolist() == [-2.0, -2.0]


def test_a_disabled_scaler_gives_the_same_object() -> None:
    given = {"a": Output(loss(), None)}
    assert make_scaler("mezzo", enabled=False).scale(given) is given
