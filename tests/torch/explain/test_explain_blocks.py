"""Blocks of `explain`: nesting, exceptions, options, what is left behind, and what a block does not hold."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

from mezzo.errors import OptionError
from mezzo.torch import explain, find_nonfinite
from mezzo.torch.watch_mode import FRONT_KEY

from .nets import batch, forward, loss_of, net


def is_left_over() -> bool:
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._dispatch_tls_is_dispatch_key_included(FRONT_KEY)
        or modules._global_forward_hooks
        or modules._global_forward_pre_hooks
    )


def test_nothing_is_left_behind() -> None:
    with explain() as explained:
        assert is_left_over()
        loss_of(net())
    assert explained.report.records
    assert not is_left_over()


def test_an_exception_comes_through_and_leaves_nothing_behind() -> None:
    class Stops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.relu()
            raise KeyboardInterrupt

    with explain() as explained, pytest.raises(KeyboardInterrupt):
        nn.Sequential(nn.Linear(4, 4), Stops())(torch.ones(2, 4))
    assert not is_left_over()
    assert [record.path for record in forward(explained.report, "aten::relu")] == [("1",)]
    with explain() as again:
        torch.ones(3).relu()
    assert forward(again.report, "aten::relu")[0].path == ()


def test_an_op_that_fails_has_no_record() -> None:
    with explain() as explained, pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert {record.op for record in explained.report.records} == {"aten::ones"}


def test_blocks_can_be_nested_and_overlap() -> None:
    outer, inner = explain(), explain()
    with outer:
        torch.ones(3).relu()
        with inner, find_nonfinite() as found:
            torch.ones(3).sigmoid()
        torch.ones(3).tanh()
    assert [record.op for record in outer.report.records if record.op != "aten::ones"] == [
        "aten::relu",
        "aten::sigmoid",
        "aten::tanh",
    ]
    assert [record.op for record in inner.report.records] == ["aten::ones", "aten::sigmoid"]
    assert found.first is None
    assert found.report.ops == 2


def test_one_object_may_be_entered_again_and_reports_the_last_block() -> None:
    explained = explain()
    with explained:
        torch.ones(3).relu()
        with explained:
            torch.ones(3).tanh()
            assert "aten::relu" not in str(explained.report.records)
        torch.ones(3).sigmoid()
    assert [record.op for record in forward(explained.report)][1::2] == ["aten::relu", "aten::tanh", "aten::sigmoid"]


def test_a_report_may_be_asked_for_while_the_block_runs() -> None:
    with explain() as explained:
        torch.ones(3).relu()
        first = explained.report
        torch.ones(3).tanh()
    assert len(first.records) == 2
    assert len(explained.report.records) == 4


def test_records_keep_no_tensor_alive() -> None:
    with explain(numerics=True, shadow=True) as explained:
        x = torch.randn(1000, requires_grad=True)
        y = (x * 2).exp()
        gone = weakref.ref(y)
        y.sum().backward()
        del y
        gc.collect()
        assert gone() is None, "while the block runs"
    storage = weakref.ref(x)
    del x
    gc.collect()
    assert storage() is None
    assert len(explained.report.records) > 4


def test_the_limit_bounds_the_records_and_is_told() -> None:
    with explain(limit=3) as explained:
        for _ in range(5):
            torch.ones(3).relu()
    assert len(explained.report.records) == 3
    assert "7 ops after the first 3 have no record: explain(limit=...)" in explained.report.notes


def test_a_block_without_ops_says_so() -> None:
    with explain() as explained:
        pass
    assert explained.report.records == ()
    assert explained.report.notes == ("no op ran in this thread",)


def test_a_function_is_called_once_with_what_it_is_given() -> None:
    calls = []

    def step(x: torch.Tensor, *, times: int) -> None:
        calls.append((x.shape, times))
        (x * times).relu()

    report = explain(step)(torch.ones(2), times=3)
    assert calls == [((2,), 3)]
    assert report.title == "step"
    assert [record.op for record in report.records] == ["aten::mul", "aten::relu"]


def test_numbers_are_there_when_asked_for_and_only_then() -> None:
    model = net()
    assert all(record.numbers is None for record in explain(model)(batch()).records)
    with explain(model, numerics=True) as explained:
        loss_of(model).backward()
    linear = forward(explained.report, "aten::linear")[0]
    assert linear.numbers is not None
    assert linear.numbers.elements == 2 * 4 * 24
    assert linear.numbers.error is None
    backward = [record for record in explained.report.records if record.phase == "backward" and record.dot]
    assert all(record.numbers is not None and record.numbers.max_abs > 0 for record in backward)


def test_the_shadow_run_tells_how_far_results_are_off() -> None:
    model = net()
    with explain(model, shadow=True) as explained:
        loss_of(model).backward()
    errors = [record.numbers.error for record in forward(explained.report, "aten::linear") if record.numbers]
    assert len(errors) == 5
    assert all(error is not None and 0 < error < 0.05 for error in errors)  # bfloat16 has 8 bits: 2**-8 an op


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: explain(3),
            r"explain takes a model or a function, got int: explain\(model\)\(inputs\), or `with explain",
        ),
        (lambda: explain(limit=0), "limit is a number of records, at least 1; got 0"),
        (lambda: explain(limit=True), "limit is a number of records, at least 1; got True"),
        (explain(), r"explain\(\) was given nothing to call: explain\(model\)\(inputs\), or use it as a context"),
        (lambda: explain().report, "explain has watched nothing yet: enter the block, or call it"),
    ],
)
def test_wrong_use_is_told(make: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()  # type: ignore[operator]


def test_layers_that_are_called_by_themselves_are_named_in_one_look() -> None:
    model = nn.ModuleList([nn.ReLU() for _ in range(300)])
    with explain() as explained:
        for layer in model:
            layer(torch.ones(1))
    start = time.perf_counter()
    assert forward(explained.report, "aten::relu")[299].path == ("299",)
    assert time.perf_counter() - start < 5  # a look for each took 15 s
