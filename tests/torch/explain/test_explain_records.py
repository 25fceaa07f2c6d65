"""What the records of `explain` say: op, module, line, rule, dtypes, casts."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
from torch import nn

import mezzo
from mezzo.torch import autocast, explain, set_precision

from .nets import Block, batch, forward, loss_of, net, only

LOW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("low", LOW, ids=str)
def test_a_listed_op_is_one_record_with_its_rule_and_casts(low: torch.dtype) -> None:
    model, name = net(), str(low).removeprefix("torch.")
    with explain(model) as explained:
        loss_of(model, low)
    record = only(explained.report.where(path="blocks.1.qkv", op="aten::linear").records[:])  # type: ignore[arg-type]
    assert record.rule == "lower_precision_fp"
    assert record.reason == "rule of aten::linear in the policy 'default'"
    assert (record.came, record.used, record.gave) == (("float32",) * 3, (name,) * 3, (name,))
    assert record.operands == ("", "blocks.1.qkv.weight", "blocks.1.qkv.bias")
    assert [cast.elements for cast in record.casts] == [2 * 4 * 8, 8 * 24, 24]
    assert sum(cast.bytes_written for cast in record.casts) == 2 * (64 + 192 + 24)
    assert record.dot
    assert record.phase == "forward"


def test_an_op_has_the_users_line() -> None:
    model = net()
    record = forward(explain(model)(batch()), "aten::add")[0]
    lines, start = inspect.getsourcelines(Block.forward)
    place = next(number for number, line in enumerate(lines) if "return x + " in line)
    assert record.source is not None
    assert record.source.file.endswith("nets.py")
    assert (record.source.line, record.source.function) == (start + place, "forward")


def test_an_op_that_is_not_listed_says_so_and_what_came() -> None:
    with explain() as explained, autocast("cpu", dtype=torch.bfloat16):
        torch.ones(3, dtype=torch.bfloat16).relu()
    record = forward(explained.report, "aten::relu")[0]
    assert (record.rule, record.came, record.used, record.gave) == ("not listed", *(("bfloat16",),) * 3)


def test_autocast_that_is_off_is_told_from_an_op_that_is_not_listed() -> None:
    with explain() as explained:
        torch.ones(3).relu()
        with autocast("cpu"):
            torch.ones(3).relu()
            with autocast("cpu", enabled=False):
                torch.ones(3).relu()
            torch.ones(3).relu()
        torch.ones(3).relu()
    rules = [record.rule for record in forward(explained.report, "aten::relu")]
    assert rules == ["autocast off", "not listed", "autocast off", "not listed", "autocast off"]


def test_a_plain_region_is_seen_with_pytorchs_policy() -> None:
    linear = nn.Linear(4, 4)
    with explain(linear) as explained, torch.autocast("cpu", dtype=torch.bfloat16):
        linear(torch.ones(2, 4))
    record = only(forward(explained.report, "aten::linear"))
    assert (record.path, record.reason) == (("(Linear)",), "rule of aten::linear in the policy 'torch'")


def test_a_policys_own_rule_is_seen_from_the_first_op_on() -> None:
    policy = mezzo.builtin_policy("default").override({"relu": "fp32"}, name="mine")
    with explain() as explained:
        x = torch.ones(3, dtype=torch.bfloat16)
        with autocast("cpu", policy=policy):
            x.relu()
    record = only(forward(explained.report, "aten::relu"))
    assert (record.rule, record.came, record.used, record.gave) == ("fp32", ("bfloat16",), ("float32",), ("float32",))
    assert record.reason == "rule of aten::relu in the policy 'mine'"


def test_a_modules_own_policy_is_seen() -> None:
    model = net()
    set_precision(model, {"blocks.0": "fp32"})
    with explain(model) as explained:
        loss_of(model)
    used = {record.path[0]: record.used[0] for record in forward(explained.report, "aten::linear")}
    assert used == {
        "blocks.0.qkv": "float32",
        "blocks.0.out": "float32",
        "blocks.1.qkv": "bfloat16",
        "blocks.1.out": "bfloat16",
        "head": "bfloat16",
    }


def test_a_kept_cast_of_a_weight_is_no_cast() -> None:
    linear = nn.Linear(4, 4)
    with explain(linear) as explained, autocast("cpu", dtype=torch.bfloat16):
        linear(linear(torch.ones(2, 4)))
    first, second = forward(explained.report, "aten::linear")
    assert (len(first.casts), first.kept) == (3, ())
    assert (len(second.casts), second.kept) == (0, (1, 2))
    assert second.used == ("bfloat16",) * 3


@pytest.mark.parametrize("region", [autocast, torch.autocast], ids=["mezzo", "torch"])
def test_without_the_cache_each_use_of_a_weight_is_a_cast(region: type) -> None:
    linear = nn.Linear(4, 4)
    with explain(linear) as explained, region("cpu", dtype=torch.bfloat16, cache_enabled=False):
        linear(linear(torch.ones(2, 4)))
    assert [len(record.casts) for record in forward(explained.report, "aten::linear")] == [3, 2]


def test_a_cast_by_hand_is_told_from_autocasts() -> None:
    with explain() as explained, autocast("cpu", dtype=torch.bfloat16):
        torch.ones(3, 3).bfloat16().float() @ torch.ones(3, 3)
    casts = forward(explained.report, "aten::_to_copy")
    assert [(cast.rule, cast.reason, cast.came, cast.gave) for cast in casts] == [
        ("cast", "asked for by the program", ("float32",), ("bfloat16",)),
        ("cast", "asked for by the program", ("bfloat16",), ("float32",)),
    ]
    assert len(only(forward(explained.report, "aten::matmul")).casts) == 2


def test_a_repair_is_told() -> None:
    with explain() as explained, autocast("cpu", dtype=torch.bfloat16):
        torch.dot(torch.ones(3), torch.ones(3, dtype=torch.bfloat16))
    assert "repair of aten::dot" in {record.reason for record in explained.report.records}


def test_a_backward_op_has_the_place_of_the_forward_op() -> None:
    model = net()
    with explain(model) as explained:
        loss_of(model).backward()
    records = explained.report.where(path="blocks.0.qkv").records
    backward = [record for record in records if record.phase == "backward"]
    assert {record.op for record in backward} == {"aten::mm", "aten::sum", "aten::_to_copy"}
    assert {record.reason for record in backward} == {"backward of aten::linear"}
    assert {record.used[0] for record in backward if record.op == "aten::mm"} == {"bfloat16"}
    source = only([record for record in records if record.phase == "forward"]).source
    assert {record.source for record in backward} == {source}


def test_optimizer_steps_are_a_phase_of_their_own() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    with explain(model) as explained:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    stepping = [record for record in explained.report.records if record.phase == "optimizer"]
    assert {"aten::addcmul_", "aten::addcdiv_"} & {record.op for record in stepping} or "foreach" in str(stepping)
    assert "head.weight" in {name for record in stepping for name in record.operands}


def test_views_and_memory_have_no_records() -> None:
    with explain() as explained:
        torch.empty(4, 4).fill_(1.0).view(2, 8).t().expand(8, 2).detach()
    assert [record.op for record in explained.report.records] == ["aten::fill_"]


def test_shared_modules_go_by_the_name_they_are_called_under() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    report = explain(model)(torch.ones(2, 4))
    assert [record.path for record in forward(report, "aten::addmm")] == [("0.0",), ("1.0",)]


def test_a_part_of_a_model_that_is_called_by_itself_has_its_whole_name() -> None:
    model = net()
    with explain() as explained:
        model.blocks[1].out(torch.ones(2, 8))
    assert only(forward(explained.report, "aten::addmm")).path == ("blocks.1.out",)


def test_a_module_that_no_module_holds_goes_by_its_class() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(4, 4)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x)

    report = explain(Hidden())(torch.ones(2, 4))
    assert only(forward(report, "aten::addmm")).path == ("(Linear)",)


def test_the_report_is_plain_data() -> None:
    model = net()
    with explain(model, numerics=True) as explained:
        loss_of(model).backward()
    report = explained.report
    assert report.framework == "torch"
    assert report.regions[0].settings == {"dtype": "bfloat16", "policy": "default", "device": "cpu"}
    assert json.loads(json.dumps(report.as_dict()))["regions"][0]["ops"][0]["op"] == report.records[0].op


@torch.library.custom_op("mezzo_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """An op that only a policy lists."""
    return x * 2


def test_a_custom_op_that_a_policy_lists_is_seen_from_its_first_call_on() -> None:
    policy = mezzo.builtin_policy("default").override({"mezzo_test::doubled": "fp32"}, name="mine")
    with explain() as explained:
        x = torch.ones(3, dtype=torch.bfloat16)
        with autocast("cpu", policy=policy):
            doubled(x)
    record = next(one for one in explained.report.records if one.op.startswith("mezzo_test::doubled"))
    assert (record.rule, record.came, record.used) == ("fp32", ("bfloat16",), ("float32",))


def test_an_op_without_a_gradient_takes_no_place_from_the_one_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with explain(model) as explained:
        out = model(torch.ones(2, 4))
        with torch.no_grad():
            out.abs().max()
        out.backward(torch.ones_like(out))
    paths = {record.path for record in explained.report.records if record.phase == "backward" and record.dot}
    assert paths == {("0",)}
