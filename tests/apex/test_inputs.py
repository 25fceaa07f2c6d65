"""What is cast on the way into a model and out of it, row by row, and what is left alone."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
import types
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree as pytree

from mezzo.apex.amp.inputs import CastInputs, CastOutputs, cast_floats, put_casts
from mezzo.errors import AmpError

HALF = torch.float16
LOWS = [torch.float16, torch.bfloat16]
ONES = torch.ones(2)
WORDS = torch.ones(2, dtype=torch.int64)


class Pair(NamedTuple):
    left: Any
    right: Any


class Batch:
    """Says by itself how it is cast."""

    def __init__(self, image: Tensor, label: Tensor) -> None:
        self.image, self.label = image, label

    def to(self, dtype: torch.dtype) -> Batch:
        return Batch(self.image.to(dtype), self.label)


class DictBatch(dict[str, Any]):
    def to(self, dtype: torch.dtype) -> DictBatch:
        return DictBatch(image=self["image"].to(dtype), kept=self["kept"])


class NoTo:
    """Forgets to return."""

    def __init__(self) -> None:
        self.image = ONES

    def to(self, dtype: torch.dtype) -> None:
        self.image = self.image.to(dtype)


class Named(dict[str, Any]):
    """Keeps more than its items."""

    def __init__(self, name: str, **items: Any) -> None:
        super().__init__(**items)
        self.name = name


class Row(list[Any]):
    pass


class Couple(tuple[Any, ...]):
    __slots__ = ()


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict[str, Any]):
    """As in the transformers library: a dataclass that is a mapping, without the fields that are None."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclasses.dataclass
class Registered:
    image: Any
    name: str


@dataclasses.dataclass
class Plain:
    image: Any


pytree.register_pytree_node(Registered, lambda one: ([one.image], one.name), lambda new, name: Registered(*new, name))


@pytest.mark.parametrize("dtype", [*LOWS, torch.float32])
@pytest.mark.parametrize("source", [*LOWS, torch.float32, torch.float64])
def test_floating_tensors_are_cast_and_keep_their_gradients(dtype: torch.dtype, source: torch.dtype) -> None:
    given = torch.ones(2, dtype=source, requires_grad=True)
    got = cast_floats(given, dtype)
    assert got.dtype is dtype
    assert (got is given) == (source is dtype)
    got.sum().backward()
    assert given.grad is not None
    assert given.grad.dtype is source


def test_a_parameter_is_a_tensor() -> None:
    weight = nn.Parameter(torch.ones(2))
    got = cast_floats(weight, HALF)
    assert got.dtype is HALF
    assert weight.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_tensors_are_left_alone(dtype: torch.dtype) -> None:
    given = torch.zeros(2).to(dtype)
    assert cast_floats(given, HALF) is given


def _generator() -> Any:
    yield ONES


@pytest.mark.parametrize(
    "given",
    [
        *("text", b"bytes", None, True, 3, 2.5, 1j, range(3), torch.float32, torch.device("cpu"), torch.Size([2, 3])),
        *(np.ones(2), np.float32(1), nn.Linear(2, 2), Batch, torch.Tensor, _generator(), Plain(ONES), object(), len),
        *(WORDS, [WORDS, "a"], (WORDS,), {"a": WORDS}, {3}, Pair(WORDS, None), collections.deque([3])),
        *(torch.UntypedStorage(2), torch.Generator(), types.SimpleNamespace(a=ONES), collections.OrderedDict(a=WORDS)),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_has_nothing_to_cast_is_the_same_object(given: Any) -> None:
    assert cast_floats(given, HALF) is given


def test_a_module_that_is_an_argument_is_not_cast_in_place() -> None:
    module = nn.Linear(2, 2)
    assert cast_floats([module, ONES], HALF)[0] is module
    assert module.weight.dtype is torch.float32


def test_a_generator_is_not_used_up() -> None:
    given = _generator()
    cast_floats(given, HALF)
    assert next(given) is ONES


def test_numpy_arrays_keep_their_dtype() -> None:
    array, tensor = cast_floats((np.ones(2), ONES), HALF)
    assert array.dtype == np.float64
    assert tensor.dtype is HALF


@pytest.mark.parametrize(
    "given",
    [
        *([ONES, WORDS], (ONES, WORDS), Pair(ONES, WORDS), collections.deque([ONES, WORDS], maxlen=2)),
        *(Row([ONES, WORDS]), Couple((ONES, WORDS))),
    ],
    ids=lambda given: type(given).__name__,
)
def test_sequences_keep_their_type(given: Any) -> None:
    got = cast_floats(given, HALF)
    assert type(got) is type(given)
    assert [each.dtype for each in got] == [HALF, torch.int64]
    assert [each.dtype for each in given] == [torch.float32, torch.int64]
    assert list(got)[1] is WORDS


def test_a_list_keeps_its_attributes_and_a_deque_its_length() -> None:
    row = Row([ONES])
    row.name = "row"  # type: ignore[attr-defined]
    assert cast_floats(row, HALF).name == "row"
    assert cast_floats(collections.deque([ONES], maxlen=3), HALF).maxlen == 3


@pytest.mark.parametrize("kind", [set, frozenset])
def test_sets_are_cast(kind: Any) -> None:
    got = cast_floats(kind([ONES, 3]), HALF)
    assert type(got) is kind
    assert {each.dtype for each in got if isinstance(each, Tensor)} == {HALF}
    assert 3 in got


def _default() -> Any:
    made: Any = collections.defaultdict(list)
    made.update(image=ONES, kept=WORDS)
    return made


@pytest.mark.parametrize(
    "given",
    [
        {"image": ONES, "kept": WORDS},
        collections.OrderedDict(kept=WORDS, image=ONES),
        collections.UserDict(image=ONES, kept=WORDS),
        _default(),
        Named("train", image=ONES, kept=WORDS),
        DictBatch(image=ONES, kept=WORDS),
    ],
    ids=lambda given: type(given).__name__,
)
def test_mappings_keep_their_type_and_order(given: Any) -> None:
    got = cast_floats(given, HALF)
    assert type(got) is type(given)
    assert (got["image"].dtype, got["kept"]) == (HALF, WORDS) or got["kept"] is WORDS
    assert given["image"] is ONES
    assert got["image"].dtype is HALF
    assert list(got) == list(given)
    assert getattr(got, "name", None) == getattr(given, "name", None)
    assert getattr(got, "default_factory", None) == getattr(given, "default_factory", None)


def test_a_mapping_that_cannot_be_written_to_becomes_a_dict() -> None:
    got = cast_floats(types.MappingProxyType({"image": ONES}), HALF)
    assert type(got) is dict
    assert got["image"].dtype is HALF


def test_keys_are_left_alone() -> None:
    assert list(cast_floats({ONES: ONES}, HALF)) == [ONES]


def test_model_outputs_stay_model_outputs() -> None:
    given = ModelOutput(logits=ONES.half(), hidden=(ONES.half(), WORDS))
    got = cast_floats(given, torch.float32)
    assert type(got) is ModelOutput
    assert got.logits is got["logits"]
    assert (got.logits.dtype, got.hidden[0].dtype, got.hidden[1].dtype) == (torch.float32, torch.float32, torch.int64)
    assert given.logits.dtype is given["logits"].dtype is HALF
    assert list(cast_floats(ModelOutput(logits=ONES), HALF)) == ["logits"]


def test_what_is_registered_with_pytorch_is_entered() -> None:
    got = cast_floats(Registered(ONES, "a"), HALF)
    assert (got.image.dtype, got.name) == (HALF, "a")
    whole = Registered(WORDS, "a")
    assert cast_floats(whole, HALF) is whole


def test_named_results_of_pytorch_are_cast() -> None:
    got = cast_floats(torch.ones(2, 2).max(dim=0), HALF)
    assert (got.values.dtype, got.indices.dtype) == (HALF, torch.int64)


def test_an_object_says_by_its_method_to_how_it_is_cast() -> None:
    got = cast_floats({"batch": [Batch(ONES, WORDS)]}, HALF)["batch"][0]
    assert (got.image.dtype, got.label) == (HALF, WORDS) or got.label is WORDS
    assert got.image.dtype is HALF


def test_an_object_whose_method_to_returns_nothing_is_refused() -> None:
    with pytest.raises(AmpError, match=r"NoTo.to\(torch.float16\) returned None.*have NoTo.to return the object"):
        cast_floats(NoTo(), HALF)


def test_a_packed_sequence_is_cast_if_it_has_floats() -> None:
    floats, words = pack_sequence([torch.ones(2, 3), torch.ones(1, 3)]), pack_sequence([WORDS])
    got = cast_floats(floats, HALF)
    assert type(got) is PackedSequence
    assert (got.data.dtype, got.batch_sizes.dtype) == (HALF, torch.int64)
    assert cast_floats(words, HALF) is words


def test_nests_are_walked() -> None:
    given = {"a": [(ONES, {"b": Pair([ONES], "c")})], "d": ({"e": WORDS},)}
    got = cast_floats(given, HALF)
    assert got["a"][0][0].dtype is got["a"][0][1]["b"].left[0].dtype is HALF
    assert got["a"][0][1]["b"].right == "c"
    assert got["d"] is given["d"]


class Seen(nn.Module):
    """Keeps what its forward is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=HALF))

    def forward(self, x: Tensor, *args: Any, mask: Any = None) -> Any:
        self.seen = (x, args, mask)
        return {"out": x * self.weight, "mask": mask}


def test_arguments_by_position_and_by_keyword_are_cast_and_outputs_back() -> None:
    module = Seen()
    put_casts(module, HALF, torch.float32)
    out = module(ONES, [ONES], 3, mask=Pair(ONES.double(), WORDS))
    x, (listed, number), mask = module.seen
    assert (x.dtype, listed[0].dtype, number, mask.left.dtype) == (HALF, HALF, 3, HALF)
    assert (out["out"].dtype, out["mask"].left.dtype) == (torch.float32, torch.float32)
    assert out["mask"].right is WORDS


def test_hooks_that_were_there_see_the_input_as_it_comes_and_the_output_that_is_cast() -> None:
    module, seen = Seen(), []
    module.register_forward_pre_hook(lambda _module, args: seen.append(args[0].dtype))
    module.register_forward_hook(lambda _module, _args, out: seen.append(out["out"].dtype))
    put_casts(module, HALF, torch.float32)
    module.register_forward_hook(lambda _module, _args, out: seen.append(out["out"].dtype))
    module(ONES)
    assert seen == [torch.float32] * 3


def test_casts_take_the_places_of_earlier_ones() -> None:
    module = nn.ReLU()
    module.register_forward_pre_hook(lambda _module, _args: None)
    for inputs, outputs in ((HALF, torch.float32), (torch.bfloat16, torch.float64), (None, HALF)):
        put_casts(module, inputs, outputs)
        casts = [one for one in module._forward_pre_hooks.values() if isinstance(one, CastInputs)]
        assert casts == ([] if inputs is None else [CastInputs(inputs)])
        assert list(module._forward_hooks.values()) == [CastOutputs(outputs)]
    put_casts(module, None, None)
    assert not module._forward_hooks
    assert not module._forward_pre_hooks_with_kwargs
    assert len(module._forward_pre_hooks) == 1
    assert module(ONES) is not None


@pytest.mark.parametrize("kind", [CastInputs, CastOutputs])
def test_the_hooks_are_values(kind: Any) -> None:
    hook = kind(HALF)
    assert hook == kind(HALF) != kind(torch.bfloat16)
    assert pickle.loads(pickle.dumps(hook)) == copy.deepcopy(hook) == hook
    assert "float16" in repr(hook)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, batch: dict[str, Any], pair: Pair, *, scale: Tensor) -> Any:
        out = self.layer(batch["x"] * scale + pair.left)
        return {"out": [out], "words": pair.right}


@pytest.mark.parametrize("dtype", LOWS)
@pytest.mark.parametrize("how", ["model", "function around it"])
def test_casts_go_with_a_compiled_model(dtype: torch.dtype, how: str) -> None:
    net = Net().to(dtype)
    put_casts(net, dtype, torch.float32)
    batch, pair, scale = {"x": torch.rand(3, 2)}, Pair(torch.rand(2), WORDS), torch.rand(2)
    expected = net(batch, pair, scale=scale)["out"][0]
    torch.compiler.reset()

    def around(*args: Any, **kwargs: Any) -> Any:
        return net(*args, **kwargs)

    called = net if how == "model" else around
    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    got = torch.compile(called, backend=backend, fullgraph=True)(batch, pair, scale=scale)
    assert len(graphs) == 1
    assert got["out"][0].dtype is torch.float32
    assert torch.equal(got["words"], WORDS)
    assert torch.equal(got["out"][0], expected)
    got["out"][0].sum().backward()
    assert net.layer.weight.grad is not None
    torch.compiler.reset()


def test_a_mapping_of_the_users_own_is_not_written_to() -> None:
    class Batch(MutableMapping[str, Any]):
        def __init__(self, **items: Any) -> None:
            self.items_ = items

        def __getitem__(self, key: str) -> Any:
            return self.items_[key]

        def __setitem__(self, key: str, value: Any) -> None:
            self.items_[key] = value

        def __delitem__(self, key: str) -> None:
            del self.items_[key]

        def __iter__(self) -> Iterator[str]:
            return iter(self.items_)

        def __len__(self) -> int:
            return len(self.items_)

    batch = Batch(x=torch.ones(2), y=torch.tensor([70000.0, 1.0]))
    cast = cast_floats(batch, torch.float16)
    assert cast["x"].dtype is torch.float16
    assert batch["y"].dtype is torch.float32
    assert batch["y"].tolist() == [70000.0, 1.0]
