"""What ``low`` and ``keep`` select: patterns, classes and functions, parameters and buffers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations

from mezzo.errors import MezzoError, PreparationError
from mezzo.torch.masters.low_parameters import choose, choose_buffers
from tests.torch.named_model import Model
from tests.torch.prepare.choosing import LOW, chosen, reasons


@pytest.fixture
def model() -> Model:
    return Model()


ATTENTION = ["blocks.0.attn.qkv", "blocks.0.attn.out_proj", "blocks.1.attn.qkv", "blocks.1.attn.out_proj"]
BOTH = [f"{name}.{kind}" for name in ATTENTION for kind in ("weight", "bias")]
MLP = [f"blocks.{block}.mlp.{layer}.{kind}" for block in (0, 1) for layer in (0, 2) for kind in ("weight", "bias")]


def is_bias(name: str, module: nn.Module, parameter: Tensor) -> bool:
    return isinstance(module, nn.Linear) and parameter is module.bias and name.endswith(".bias")


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ((), []),
        ("blocks.0.mlp.0.weight", MLP[:1]),
        ("blocks.0.mlp.*.weight", [MLP[0], MLP[2]]),
        ("**.bias", [name for name in BOTH + MLP if name.endswith("bias")]),
        ("blocks.*.attn", BOTH),
        ("blocks.*.attn.**", BOTH),
        ("blocks.?.attn.[oq]*", BOTH),
        ("blocks", BOTH + MLP),
        ("blocks.*", BOTH + MLP),
        ("", BOTH + MLP),
        (nn.Linear, BOTH + MLP),
        (is_bias, [name for name in BOTH + MLP if name.endswith("bias")]),
        (lambda name, module, parameter: parameter.shape[0] == 24, [BOTH[0], BOTH[1], BOTH[4], BOTH[5]]),
        (["blocks.0.**", "blocks.1.attn"], [*BOTH, *MLP[:4]]),
        ({"blocks.0.**", "blocks.1.attn"}, [*BOTH, *MLP[:4]]),
        (("**.attn", is_bias), [*BOTH, *(name for name in MLP if name.endswith("bias"))]),
    ],
    ids=range(16),
)
def test_keep_takes_what_its_selectors_name(model: Model, keep: Any, kept: list[str]) -> None:
    every = [choice.name for choice in choose(model, LOW, None, (), ()) if choice.low]
    assert sorted(every) == sorted(BOTH + MLP)
    assert chosen(model, keep=keep) == [name for name in every if name not in kept]


def test_a_class_takes_the_parameters_of_its_modules_and_not_of_those_inside() -> None:
    net = nn.TransformerEncoderLayer(4, 2, 8)
    assert not set(chosen(net, keep=nn.MultiheadAttention)) & {"self_attn.in_proj_weight", "self_attn.in_proj_bias"}
    assert "self_attn.out_proj.weight" in chosen(net, keep=nn.MultiheadAttention)
    with pytest.raises(
        PreparationError, match="keep=TransformerEncoderLayer: no module of this class here has parameters"
    ):
        chosen(net, keep=nn.TransformerEncoderLayer)


def test_a_class_takes_what_is_parametrized_of_its_modules() -> None:
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)))
    assert len(chosen(net, low=nn.Linear)) == 3
    assert chosen(net, low="**", keep=nn.Linear) == []


def test_keep_beats_low_and_low_beats_the_policy(model: Model) -> None:
    found = reasons(model, low=[nn.Embedding, "blocks.0.mlp.0.weight"], keep=["blocks.0.mlp", is_bias], policy="fp32")
    assert found["embed.weight"] == "selected by Embedding"
    assert found["blocks.0.mlp.0.weight"] == "kept by 'blocks.0.mlp'"
    assert found["blocks.1.mlp.0.bias"] == "kept by is_bias"
    assert found["blocks.1.mlp.0.weight"] == "linear does not run in lower precision"


def test_the_reason_names_the_first_selector_that_fits(model: Model) -> None:
    assert reasons(model, keep=["blocks.0", "blocks.*", "lm_head"])["blocks.0.attn.qkv.bias"] == "kept by 'blocks.0'"
    assert reasons(model, low=["embed", "lm_head"])["embed.weight"] == "selected by 'embed'"


def test_a_shared_parameter_is_selected_by_any_of_its_names(model: Model) -> None:
    for name in ("embed", "lm_head", "lm_head.weight"):
        assert "embed.weight" in chosen(model, low=name)
        assert "embed.weight" not in chosen(model, low="**", keep=name)


# Buffers, and the recipes of Apex


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.plain = nn.BatchNorm2d(4, affine=False)
        self.group = nn.GroupNorm(2, 4)
        self.embed = nn.Embedding(3, 4)
        self.register_buffer("positions", torch.ones(4))
        self.register_buffer("indices", torch.arange(4))


STATISTICS = [f"{name}.{kind}" for name in ("norm", "plain") for kind in ("running_mean", "running_var")]


def buffers(model: nn.Module, low: Any, keep: Any = ()) -> list[str]:
    return [name for _, _, name in choose_buffers(model, low, keep)]


def test_the_selection_of_o2_is_all_but_the_batch_norms_and_their_statistics() -> None:
    net = Net()
    low = chosen(net, torch.float16, low="**", keep=_BatchNorm)
    assert low == ["conv.weight", "conv.bias", "group.weight", "group.bias", "embed.weight"]
    assert buffers(net, "**", _BatchNorm) == ["positions"]


def test_the_selection_of_o3_is_everything() -> None:
    net = Net()
    assert chosen(net, torch.float16, low="**") == [name for name, _ in net.named_parameters()]
    assert buffers(net, "**") == ["positions", *STATISTICS]


def test_a_batch_norm_without_parameters_is_kept_for_its_buffers() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    assert chosen(net, low="**", keep=_BatchNorm) == ["0.weight", "0.bias"]
    assert buffers(net, "**", _BatchNorm) == []
    assert buffers(net, "1.running_mean") == ["1.running_mean"]


def test_buffers_come_with_their_module_and_stay_as_they_are() -> None:
    net = Net()
    assert choose_buffers(net, "plain", "plain.running_var") == [(net.plain, "running_mean", "plain.running_mean")]
    assert {buffer.dtype for buffer in net.buffers()} == {torch.float32, torch.int64}
    assert choose_buffers(net, (), ()) == []


def test_a_buffer_of_a_shared_module_comes_once_and_one_in_low_precision_not_at_all() -> None:
    norm = nn.BatchNorm1d(2)
    norm.running_var = norm.running_var.to(LOW)
    net = nn.ModuleDict({"first": norm, "second": norm})
    assert buffers(net, "**") == ["first.running_mean"]
    assert buffers(net, "second") == ["first.running_mean"]
    assert buffers(net, "**", "second.running_mean") == []


def test_names_of_buffers_in_a_wrapper_are_pytorchs() -> None:
    net = nn.Sequential(torch.compile(nn.BatchNorm1d(2), backend="eager"))
    names = [name for name, buffer in net.named_buffers() if buffer.is_floating_point()]
    assert buffers(net, "0.running_*") == names
    for module, attribute, name in choose_buffers(net, "0", ()):
        path, _, last = name.rpartition(".")
        assert net.get_submodule(path) is module
        assert last == attribute


def test_low_may_name_floating_point_buffers_alone() -> None:
    net = Net()
    assert chosen(net, low="positions") == chosen(net)
    assert buffers(net, ["positions", "conv"]) == ["positions"]
    with pytest.raises(PreparationError, match=r"^low='indices' names no parameter, floating-point buffer or module"):
        chosen(net, low="indices")


# Errors

ALLOWED = (
    "takes a glob pattern over names of parameters or modules, a torch.nn.Module class, a function f(name, module, "
    "parameter) -> bool, or a sequence of these; got "
)


@pytest.mark.parametrize("which", ["low", "keep"])
@pytest.mark.parametrize(
    ("selector", "message"),
    [
        (None, ALLOWED + "a NoneType."),
        (3, ALLOWED + "a int."),
        (["**", 3], ALLOWED + "a int."),
        (torch.Tensor, ALLOWED + "class Tensor."),
        (nn.Linear(2, 2), ALLOWED + "a Linear. Give the module's name or its class, Linear."),
        ([nn.Parameter(torch.ones(2))], ALLOWED + "a Parameter. Give the parameter's name."),
        (b"head", ALLOWED + "a bytes."),
        ({"**": True}, ALLOWED + "a dict."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_selector_is_an_error(model: Model, which: str, selector: Any, message: str) -> None:
    with pytest.raises(PreparationError, match=f"^{which}= {re.escape(message)}$"):
        choose(model, LOW, None, **{"low": (), "keep": (), which: selector})
    with pytest.raises(PreparationError, match=f"^{which}= {re.escape(message)}$"):
        choose_buffers(model, **{"low": (), "keep": (), which: selector})


NOTHING: list[tuple[Any, str]] = [
    ("lm_hed", "'lm_hed' names no parameter, floating-point buffer or module of this model. Did you mean 'lm_head'"),
    (
        "blocks.0.mlp.0.wieght",
        "'blocks.0.mlp.0.wieght' names no parameter, floating-point buffer or module of this model. Did you mean 'blocks",
    ),
    (
        "xyz",
        "'xyz' names no parameter, floating-point buffer or module of this model. Its parameters and buffers are 'embed",
    ),
    ("blocks.0.mlp.1", "'blocks.0.mlp.1' names modules that have no parameters, and none below them."),
    (nn.GELU, "GELU: no module of this class here has parameters of its own."),
    (
        nn.EmbeddingBag,
        "EmbeddingBag: no module of this class here has parameters of its own. Did you mean 'Embedding'?",
    ),
    (
        nn.Conv2d,
        "Conv2d: no module of this class here has parameters of its own. Those that have some are Embedding, Linear.",
    ),
    (lambda name, module, parameter: False, "<lambda> is true for no parameter of this model."),
]


@pytest.mark.parametrize("which", ["low", "keep"])
@pytest.mark.parametrize(("selector", "message"), NOTHING, ids=range(len(NOTHING)))
def test_a_selector_that_names_nothing_is_an_error(model: Model, which: str, selector: Any, message: str) -> None:
    for given in (selector, ["**", selector]):
        with pytest.raises(PreparationError, match=f"^{which}={re.escape(message)}"):
            choose(model, LOW, None, **{"low": (), "keep": (), which: given})
        with pytest.raises(PreparationError, match=f"^{which}={re.escape(message)}"):
            choose_buffers(model, **{"low": (), "keep": (), which: given})


def test_low_for_what_is_never_stored_low_is_an_error(model: Model) -> None:
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    message = (
        "low='phase' names only what is never stored in another dtype: 'phase' is complex64. Allowed are float32 and"
    )
    with pytest.raises(PreparationError, match=f"^{re.escape(message)}"):
        chosen(model, low=["**", "phase"])
    assert chosen(model, low="**")


def test_the_error_is_what_code_around_may_expect() -> None:
    for kind in (MezzoError, RuntimeError, ValueError):
        assert issubclass(PreparationError, kind)


def test_an_error_in_a_function_goes_on(model: Model) -> None:
    def wrong(name: str, module: nn.Module, parameter: Tensor) -> bool:
        return bool(module.no_such_attribute)

    with pytest.raises(AttributeError, match="no_such_attribute"):
        chosen(model, keep=wrong)
