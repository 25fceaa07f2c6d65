"""What a rule of `set_precision` does in a module."""

from __future__ import annotations

import copy
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.builtin import builtin_policy
from mezzo.torch import autocast, set_precision

from .named_model import LOW, TOKENS, Model, Seen, output


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_a_module_in_fp32_casts_its_inputs_up_and_computes_in_float32(model: Model) -> None:
    low = output(model)
    set_precision(model, {"lm_head": "fp32"})
    captured: list[Tensor] = []
    model.blocks[1].register_forward_hook(lambda _module, _args, out: captured.append(out))
    got = output(model)
    assert low.dtype is LOW
    assert got.dtype is torch.float32
    assert torch.equal(got, captured[0].float() @ model.lm_head.weight.T)


def test_a_low_input_and_a_low_weight_are_lifted() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(4, 4).to(LOW), torch.rand(2, 4).to(LOW)
    set_precision(linear, {"": "fp32"})
    got = output(linear, x)
    assert torch.equal(got, F.linear(x.float(), linear.weight.float(), linear.bias.float()))


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize("rule", ["fp32", builtin_policy("fp32")], ids=str)
def test_low_tensors_in_any_pytree_of_arguments_are_cast_up_and_nothing_else(rule: Any) -> None:
    module = Seen()
    set_precision(module, {"": rule})
    low, half = torch.ones(2, dtype=LOW), torch.ones(2, dtype=torch.float16)
    kept = [torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64), "text", None]
    meta = torch.ones(2, dtype=LOW, device="meta")
    state = {"a": torch.ones(2)}
    with autocast("cpu", dtype=LOW):
        module(low, Pair(low, [half, 3]), state, meta, *kept, mask={"m": (low,)}, state=state)
    first, pair, same, on_meta, *rest = module.args
    assert first.dtype is pair.left.dtype is pair.right[0].dtype is torch.float32
    assert type(pair) is Pair
    assert pair.right[1] == 3
    assert same is state
    assert on_meta is meta
    assert all(one is other for one, other in zip(rest, kept, strict=True))
    assert module.kwargs["mask"]["m"][0].dtype is torch.float32
    assert module.kwargs["state"] is state


def test_another_policy_leaves_the_inputs_as_they_come() -> None:
    module = Seen()
    set_precision(module, {"": "unified"})
    low = torch.ones(2, dtype=LOW)
    with autocast("cpu", dtype=LOW):
        module(low)
    assert module.args[0] is low
    assert module.policy == "unified"


def test_overrides_change_the_policy_that_is_in_force_around_the_module(model: Model) -> None:
    set_precision(model, {"blocks.0.attn": {"softmax": "lower_precision_fp"}, "blocks.1.attn": {"softmax": "fp32"}})
    for policy in ("unified", "torch"):
        output(model, policy=policy)
    # CUDA's list, and so "unified", has softmax in float32; the CPU's own has it nowhere.
    assert model.blocks[0].attn.seen == [LOW, LOW]
    assert model.blocks[1].attn.seen == [torch.float32, torch.float32]


def test_overrides_keep_the_other_rules_of_the_policy_around_them() -> None:
    module = Seen()
    set_precision(module, {"": {"softmax": "fp32"}})
    results = {policy: output(module, policy=policy).dtype for policy in ("torch", "fp32")}
    assert results == {"torch": LOW, "fp32": torch.float32}
    assert module.policy == "fp32+"


def test_an_inner_module_wins_over_an_outer_one(model: Model) -> None:
    set_precision(model, {"": "fp32", "blocks.0.attn": {"softmax": "lower_precision_fp"}, "blocks.1.attn": "torch"})
    assert output(model).dtype is torch.float32
    assert model.blocks[0].attn.seen == [LOW]
    assert model.blocks[1].attn.seen == [LOW]


def test_of_several_patterns_the_last_counts_and_of_several_calls_too() -> None:
    module = Seen()
    first = set_precision(module, {"**": "fp32", "": "unified"})
    output(module)
    assert module.policy == "unified"
    second = set_precision(module, {"": "fp32"})
    output(module)
    assert module.policy == "fp32"
    second.remove()
    output(module)
    assert module.policy == "unified"
    second = set_precision(module, {"": "fp32"})
    first.remove()
    output(module)
    assert module.policy == "fp32"
    second.remove()
    second.remove()
    assert not module._forward_pre_hooks
    assert not module._forward_hooks


@pytest.mark.parametrize("rule", ["fp32", {"linear": "fp32"}], ids=str)
def test_outside_of_an_enabled_region_nothing_changes(rule: Any) -> None:
    linear, x = nn.Linear(4, 4).to(LOW), torch.ones(1, 4, dtype=LOW)
    set_precision(linear, {"": rule})
    assert linear(x).dtype is LOW
    with autocast("cpu", enabled=False):
        assert linear(x).dtype is LOW
    with autocast("cpu", dtype=LOW), torch.autocast("cpu", enabled=False):
        assert linear(x).dtype is LOW


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_pytorchs_own_regions_count(low: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    set_precision(net, {"1": "fp32"})
    with torch.autocast("cpu", dtype=low):
        assert net[0](torch.ones(1, 4)).dtype is low
        assert net(torch.ones(1, 4)).dtype is torch.float32
        assert net[0](torch.ones(1, 4)).dtype is low


def test_gradients_are_those_of_float32_where_the_module_is(model: Model) -> None:
    """The whole model in fp32, in a region, gives float32's gradients exactly."""
    output_of, reference = copy.deepcopy(model), copy.deepcopy(model)
    set_precision(output_of, {"": "fp32"})
    output(output_of).square().sum().backward()
    reference(TOKENS).square().sum().backward()
    for (name, one), other in zip(output_of.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_enters_the_policy_again(model: Model, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    set_precision(model, {"blocks.*.attn": {"softmax": "fp32"}, "blocks.1": "fp32"})
    plain = copy.deepcopy(model)
    x = torch.rand(2, 3, 8)
    gradients = []
    for net, again in ((plain, False), (model, True)):
        entry = x.clone().requires_grad_()
        with autocast("cpu", dtype=LOW):
            out = entry * 1
            for block in net.blocks:
                out = checkpoint(block, out, use_reentrant=reentrant) if again else block(out)
        out.float().square().sum().backward()
        gradients.append(entry.grad)
    assert torch.equal(*gradients)
    assert model.blocks[0].attn.seen == [torch.float32, torch.float32]


def test_a_layer_with_a_fast_path_takes_the_slow_one_and_gives_its_numbers() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True).eval()
    x = torch.rand(2, 3, 8)
    expected = layer(x)
    set_precision(layer, {"linear1": "fp32", "linear2": "fp32", "self_attn": "fp32", "norm*": "fp32"})
    with torch.inference_mode():
        got = output(layer, x)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_a_parametrization_is_a_module_that_is_called() -> None:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    placed = set_precision(linear, {"parametrizations.weight.0": "fp32"})
    output(linear, torch.ones(1, 4))
    assert placed.unused() == ()


def test_modules_that_have_not_run_can_be_asked_for(model: Model) -> None:
    placed = set_precision(model, {"blocks.*.attn": "fp32", "lm_head": "fp32"})
    model(TOKENS)
    assert placed.unused() == ("blocks.0.attn", "blocks.1.attn", "lm_head")
    model.lm_head = nn.Identity()
    output(model)
    assert placed.unused() == ("lm_head",)
