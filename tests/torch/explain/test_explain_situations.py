"""`explain` where programs do more than call layers: checkpointing, custom Functions, in-place ops, RNNs, compiled code."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezzo.torch import autocast, explain

from .nets import batch, forward, loss_of, net, only


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_what_checkpointing_runs_again_is_marked(reentrant: bool) -> None:
    model, x = net(), batch().requires_grad_()

    def run(x: Tensor) -> Tensor:
        return checkpoint(model.blocks[0], x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    with explain(model) as explained:
        with autocast("cpu", dtype=torch.bfloat16):
            loss = run(x).sum()
        loss.backward()
    records = explained.report.where(path="blocks.0.qkv").records
    linear = [record for record in records if record.op == "aten::linear"]
    assert [record.phase for record in linear] == ["forward", "recomputation"]
    assert linear[0].source is not None
    assert linear[0].source == linear[1].source
    assert {record.reason for record in records if record.phase == "backward"} == {"backward of aten::linear"}


def test_checkpointing_of_a_function_without_modules_is_marked_too() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    with explain() as explained, autocast("cpu", dtype=torch.bfloat16):
        checkpoint(lambda x: (x @ weight).relu(), torch.ones(2, 4), use_reentrant=False).sum().backward()
    phases = [record.phase for record in explained.report.records if record.op == "aten::matmul"]
    assert phases == ["forward", "recomputation"]


class Squared(torch.autograd.Function):
    """Has a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (grad * x).mul(2)


class UsesSquared(nn.Module):
    """Calls it."""

    def forward(self, x: Tensor) -> Tensor:
        return Squared.apply(x)  # type: ignore[no-any-return]


def test_a_custom_function_has_its_module_and_lines_in_both_passes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), UsesSquared())
    with explain(model) as explained:
        model(torch.ones(2, 4)).sum().backward()
    records = explained.report.where(path="1").records
    assert [(record.op, record.phase) for record in records] == [
        ("aten::mul", "forward"),
        ("aten::mul", "backward"),
        ("aten::mul", "backward"),
    ]
    assert [record.source.function for record in records if record.source] == ["forward", "backward", "backward"]


def test_in_place_ops_are_records_and_producers() -> None:
    with explain() as explained, autocast("cpu", dtype=torch.bfloat16):
        x = torch.ones(2, 2) @ torch.ones(2, 2)
        x.add_(1).relu_()
    assert [record.op for record in forward(explained.report)][-3:] == ["aten::matmul", "aten::add_", "aten::relu_"]
    assert forward(explained.report, "aten::add_")[0].gave == ("bfloat16",)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_nets_keep_the_name_of_their_module(kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"encoder": kind(4, 4)})
    with explain(model) as explained, autocast("cpu", dtype=torch.bfloat16):
        model["encoder"](torch.randn(3, 2, 4))[0].float().sum().backward()
    dots = [record for record in explained.report.records if record.dot]
    assert dots
    assert {record.path for record in dots} == {("encoder",)}
    assert {"forward", "backward"} <= {record.phase for record in dots}


def test_fused_attention_is_one_record_with_its_rule() -> None:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with explain() as explained, autocast("cpu", dtype=torch.bfloat16):
        nn.functional.scaled_dot_product_attention(q, q, q).float().sum().backward()
    record = only(forward(explained.report, "aten::scaled_dot_product_attention"))
    assert (record.rule, record.used) == ("lower_precision_fp", ("bfloat16",) * 3)
    assert {one.reason for one in explained.report.records if one.phase == "backward" and one.dot} == {
        "backward of aten::scaled_dot_product_attention"
    }


def test_the_fast_path_of_an_encoder_layer_stays_and_is_told() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        report = explain(layer)(torch.randn(2, 3, 8))
    assert [record.op for record in report.records] == ["aten::_transformer_encoder_layer_fwd"]
    assert "the ops inside cannot be seen: aten::_transformer_encoder_layer_fwd (1)" in report.notes[-1]


def test_compiled_code_is_seen_as_the_eager_program_and_the_report_says_so() -> None:
    torch.compiler.reset()
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    plain, seen = explain(model), explain(compiled, model=model)
    with torch.no_grad(), autocast("cpu", dtype=torch.bfloat16):
        compiled(batch())
        expected, report = plain(batch()), seen(batch())
        again = compiled(batch())
    assert [(one.op, one.path, one.used) for one in report.records] == [
        (one.op, one.path, one.used) for one in expected.records
    ]
    assert any("PyTorch runs compiled functions as eager code while ops are watched" in note for note in report.notes)
    assert not any("torch.compile" in note for note in expected.notes)
    assert again.dtype is torch.bfloat16
    torch.compiler.reset()


def test_transforms_of_functions_are_seen() -> None:
    model = net()
    with explain(model) as explained, autocast("cpu", dtype=torch.bfloat16):
        torch.func.vmap(lambda x: model(x[None])[0])(batch())
    dots = [record for record in forward(explained.report) if record.dot]
    assert {"bfloat16"} == {dtype for record in dots for dtype in record.used}


def test_gradients_of_gradients_are_seen() -> None:
    x = torch.ones(3, requires_grad=True)
    with explain() as explained:
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        first.sum().backward()
    assert [record.phase for record in explained.report.records].count("backward") > 3


def test_threads_do_not_see_each_other() -> None:
    reports: dict[str, Any] = {}
    barrier = threading.Barrier(2)

    def watch(name: str, function: str) -> None:
        with explain() as explained:
            barrier.wait()
            for _ in range(20):
                getattr(torch.ones(3), function)()
            barrier.wait()
        reports[name] = explained.report

    threads = [threading.Thread(target=watch, args=pair) for pair in (("a", "relu"), ("b", "sigmoid"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sum(record.op == op for record in reports["a"].records) for op in ("aten::relu", "aten::sigmoid")] == [
        20,
        0,
    ]
    assert [sum(record.op == op for record in reports["b"].records) for op in ("aten::relu", "aten::sigmoid")] == [
        0,
        20,
    ]


def test_backward_passes_of_several_losses_are_told_apart_by_module() -> None:
    one, two = net(), net()
    with explain() as explained:
        (loss_of(one) + loss_of(two)).backward()
    paths = {record.path for record in explained.report.records if record.phase == "backward" and record.dot}
    assert {("(Net).blocks.1.out",), ("(Net 2).blocks.1.out",)} <= paths
