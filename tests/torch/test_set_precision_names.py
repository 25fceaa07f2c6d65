"""Which modules a pattern of `set_precision` names, and what is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo import Policy
from mezzo.errors import PolicyError, UnknownOpError, UnknownPolicyError
from mezzo.torch import clear_precision, set_precision
from mezzo.torch.module_names import UnknownModuleError

from .named_model import Model, Seen, output


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


# Patterns


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("lm_head", ("lm_head",)),
        ("*", ("embed", "lm_head")),
        ("blocks.*", ("blocks.0", "blocks.1")),
        ("blocks.*.attn", ("blocks.0.attn", "blocks.1.attn")),
        ("blocks.1.mlp.?", ("blocks.1.mlp.0", "blocks.1.mlp.1", "blocks.1.mlp.2")),
        ("blocks.[!0].attn", ("blocks.1.attn",)),
        ("**.out_proj", ("blocks.0.attn.out_proj", "blocks.1.attn.out_proj")),
        ("**.attn.**.qkv", ("blocks.0.attn.qkv", "blocks.1.attn.qkv")),
        ("blocks.0.attn.**", ("blocks.0.attn", "blocks.0.attn.qkv", "blocks.0.attn.out_proj")),
        ("", ("",)),
    ],
)
def test_a_pattern_names_modules_part_by_part(model: Model, pattern: str, names: tuple[str, ...]) -> None:
    with set_precision(model, {pattern: "fp32"}) as placed:
        assert placed.matched == {pattern: names}


def test_two_stars_alone_are_the_model_and_all_that_is_in_it(model: Model) -> None:
    placed = set_precision(model, {"**": "torch"})
    called = [name for name, _ in model.named_modules() if name != "blocks"]
    assert list(placed.matched["**"]) == called
    assert placed.skipped == {"blocks": "a ModuleList has no forward; name what is in it, 'blocks.*'"}


def test_a_shared_module_is_found_under_each_of_its_names() -> None:
    shared = nn.Linear(4, 4)
    net = nn.ModuleDict({"first": shared, "second": shared})
    for name in ("first", "second"):
        with set_precision(net, {name: "fp32"}) as placed:
            assert placed.matched[name] == (name,)
            assert output(shared, torch.ones(1, 4)).dtype is torch.float32
    with set_precision(net, {"*": "fp32"}) as placed:
        assert placed.matched["*"] == ("first", "second")
        assert len(shared._forward_pre_hooks) == 1


def test_wrappers_are_looked_through(model: Model) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped = nn.DataParallel(torch.compile(checkpoint_wrapper(model), backend="eager"))
    with set_precision(wrapped, {"lm_head": "fp32", "": "torch"}) as placed:
        assert placed.matched == {"lm_head": ("lm_head",), "": ("",)}
        assert len(model.lm_head._forward_pre_hooks) == 1
        assert output(model).dtype is torch.float32


# Errors

CONTAINER = """\
'blocks' names only modules whose forward is never called, so it would change nothing:
  'blocks': a ModuleList has no forward; name what is in it, 'blocks.*'"""


@pytest.mark.parametrize(
    ("pattern", "advice"),
    [
        ("lm_hed", "'lm_hed' names no module of this model. Did you mean 'lm_head'?"),
        ("block.*.attn", "'block.*.attn' names no module of this model. Did you mean 'blocks.*.attn'"),
        (
            "xyz",
            "'xyz' names no module of this model. Its modules are 'embed', 'blocks.0', 'blocks.0.attn', ",
        ),
        (
            "blocks",
            CONTAINER,
        ),
    ],
)
def test_a_pattern_that_would_do_nothing_is_an_error(model: Model, pattern: str, advice: str) -> None:
    with pytest.raises(UnknownModuleError, match=f"^{re.escape(advice)}"):
        set_precision(model, {"lm_head": "fp32", pattern: "fp32"})
    assert not model.lm_head._forward_pre_hooks


def test_the_output_projection_of_pytorchs_attention_is_never_called() -> None:
    layer = nn.TransformerDecoderLayer(8, 2)
    message = (
        "'**.out_proj' names only modules whose forward is never called, so it would change nothing:\n"
        "  'self_attn.out_proj': its weights are read by the MultiheadAttention around it; name 'self_attn'\n"
        "  'multihead_attn.out_proj': its weights are read by the MultiheadAttention around it; name 'multihead_attn'"
    )
    with pytest.raises(UnknownModuleError, match=f"^{re.escape(message)}$"):
        set_precision(layer, {"**.out_proj": "fp32"})
    ran: list[nn.Module] = []
    layer.self_attn.out_proj.register_forward_hook(lambda module, *_: ran.append(module))
    layer(torch.rand(2, 1, 8), torch.rand(2, 1, 8))
    assert ran == []


def test_the_output_projection_of_an_attention_that_calls_it_is_taken() -> None:
    class Calling(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.out_proj(x)

    net = Calling(4, 1)
    set_precision(net, {"out_proj": "fp32"})
    assert output(net, torch.ones(1, 4)).dtype is torch.float32


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_script_module_takes_no_hooks() -> None:
    net = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))
    message = "'0': it is a ScriptModule, on which PyTorch supports no hooks; name the module around it"
    with pytest.raises(UnknownModuleError, match=re.escape(message)):
        set_precision(net, {"0": "fp32"})
    assert set_precision(net, {"*": "fp32"}).matched["*"] == ("1",)


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (
            {},
            PolicyError,
            "rule for 'lm_head': {} names no op, so it would change nothing; write {'softmax': 'fp32'} with",
        ),
        ("bfloat16", UnknownPolicyError, "rule for 'lm_head': 'bfloat16' is no built-in policy; allowed are "),
        (
            "lower_precision_fp",
            PolicyError,
            "rule for 'lm_head': 'lower_precision_fp' is a rule for an op; write {'softmax': 'lower_precision_fp'} with",
        ),
        (
            torch.float32,
            PolicyError,
            "rule for 'lm_head': policy must be a Policy, a built-in name or the path of a .toml",
        ),
        (None, PolicyError, "rule for 'lm_head': policy must be a Policy"),
        (
            {"softmax": "low"},
            PolicyError,
            "rule for 'lm_head': rule for 'softmax': 'low' is not a cast policy; allowed are",
        ),
        (
            {"sofmax": "fp32"},
            UnknownOpError,
            "rule for 'lm_head': 'sofmax' is no op that this framework has. Did you mean",
        ),
    ],
    ids=str,
)
def test_a_rule_that_is_none_is_an_error(model: Model, rule: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        set_precision(model, {"blocks.*": "fp32", "lm_head": rule})
    assert not model.blocks[0]._forward_pre_hooks


@pytest.mark.parametrize(("rule", "error"), [("float32", UnknownPolicyError), (torch.float32, PolicyError)], ids=str)
def test_who_means_float32_is_offered_fp32(model: Model, rule: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r" Did you mean 'fp32'\?$"):
        set_precision(model, {"lm_head": rule})


def test_what_is_no_model_and_no_mapping_is_an_error(model: Model) -> None:
    with pytest.raises(TypeError, match=r"^set_precision takes a torch\.nn\.Module, got Linearity\.$"):
        set_precision(type("Linearity", (), {})(), {"": "fp32"})  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"^set_precision takes a mapping from name pattern to policy or rules, got str"
    ):
        set_precision(model, "fp32")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^set_precision: name patterns are strings, got 0"):
        set_precision(model, {0: "fp32"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"^clear_precision takes a torch\.nn\.Module, got str"):
        clear_precision("model")  # type: ignore[arg-type]


def test_a_policy_file_is_read_when_it_is_set(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    Policy("mine", {"linear": "fp32"}).save(path)
    module = Seen()
    set_precision(module, {"": path})
    path.unlink()
    assert output(module).dtype is torch.float32
    assert module.policy == "mine"
