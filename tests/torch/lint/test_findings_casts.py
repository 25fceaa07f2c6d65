"""Findings of casts that need not be made: recorded programs, and near misses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezzo.report import Finding
from mezzo.report.records import itemsize
from mezzo.torch import autocast, explain, keep_casts

from .made import kinds, only, op

LOW = torch.bfloat16


class Two(nn.Module):
    """Two linear layers, and what is done in between."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


def found(kind: str, run: Callable[[], object], model: nn.Module) -> list[Finding]:
    """Watch a call, and give the findings of a kind."""
    with explain(model=model) as explained:
        run()
    return [one for one in explained.report.warnings if one.kind == kind]


def once(model: nn.Module) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with autocast("cpu", dtype=LOW):
            return model(torch.ones(2, 8))

    return run


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.float(),
        lambda x: x.float().view(2, 8).clone(),
        lambda x: x.float().to(LOW),
    ],
    ids=["layer", "through a copy", "program"],
)
def test_a_cast_up_that_is_undone_is_found_where_it_is_made(between: Callable[[Tensor], Tensor]) -> None:
    [finding] = found("redundant casts", once(net := Two(between)), net)
    assert finding.source is not None
    assert finding.source.file == __file__
    assert "bfloat16 is cast to float32 in '(Two)' and back to bfloat16 by" in finding.message
    # 2 x 8 elements, of 2 and 4 bytes, read and written up and down.
    assert "2 casts that move 192 B" in finding.message
    assert finding.advice.startswith(f"leave the cast to float32 at {finding.source.place} away")


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.float().exp(),
        lambda x: (y := x.float(), y.mean())[0],
        lambda x: x.float().half(),
        lambda x: x.double().float().double(),
        lambda x: x,
    ],
    ids=["an op between", "another reader", "to another dtype", "from float64", "no cast"],
)
def test_a_cast_up_that_is_used_is_not_found(between: Callable[[Tensor], Tensor]) -> None:
    assert found("redundant casts", once(net := Two(between)), net) == []


def test_the_result_is_the_same_without_a_redundant_cast() -> None:
    torch.manual_seed(0)
    with_cast, without = Two(lambda x: x.float()), Two(lambda x: x)
    without.load_state_dict(with_cast.state_dict())
    assert torch.equal(once(with_cast)(), once(without)())


def test_weights_that_a_second_region_casts_again_are_found_by_name() -> None:
    net = Two(lambda x: x)
    run = once(net)

    def twice() -> None:
        run()
        run()

    [finding] = found("weight cast again", twice, net)
    assert finding.message.startswith(
        "first.weight, first.bias, second.weight and 1 more: cast to bfloat16 again 4 times"
    )
    # Two weights of 64 and two biases of 8 elements: 6 bytes each, read and written.
    assert f"moves {144 * 6} B" in finding.message
    assert "each region drops its casts at its end" in finding.message
    assert "mezzo.torch.keep_casts()" in finding.advice


def test_the_cure_of_weights_cast_again_cures_it() -> None:
    net = Two(lambda x: x)
    run = once(net)

    def twice() -> None:
        with keep_casts():
            run()
            run()

    assert found("weight cast again", twice, net) == []


def test_a_weight_that_a_step_has_changed_is_cast_anew_with_no_finding() -> None:
    net = Two(lambda x: x)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = once(net)

    def two_steps() -> None:
        for _ in range(2):
            run().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert found("weight cast again", two_steps, net) == []


def test_one_region_casts_a_shared_weight_once_with_no_finding() -> None:
    net = Two(lambda x: x)
    net.second = net.first
    assert found("weight cast again", once(net), net) == []


def test_a_view_of_a_weight_is_cast_again_and_found() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            x = x @ self.table.T
            return x @ self.table.T

    [finding] = found("weight cast again", once(net := Views()), net)
    assert finding.message.startswith("table: cast to bfloat16 again once")
    assert "several ops read it" in finding.message


def test_checkpointing_that_casts_weights_again_is_found_as_such() -> None:
    net = Two(lambda x: x)
    x = torch.ones(2, 8, requires_grad=True)

    def step() -> None:
        with autocast("cpu", dtype=LOW):
            out = checkpoint(net, x, use_reentrant=False)
        out.sum().backward()

    [finding] = found("weight cast again", step, net)
    assert "activation checkpointing runs the forward pass again" in finding.message


def test_a_result_that_several_ops_cast_is_found() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.exp(x)
            return self.q(x) + self.k(x) + self.v(x)

    [finding] = found("activation cast again", once(net := Attention()), net)
    assert (
        "float32 result of exp in '(Attention)' is cast to bfloat16 by 3 ops (linear), each for itself"
        in finding.message
    )
    # Two of three casts of 2 x 8 elements, 4 bytes read and 2 written.
    assert "move 192 B" in finding.message


def test_a_result_that_one_op_casts_or_several_read_as_it_is_is_not_found() -> None:
    one = Two(torch.exp)
    assert found("activation cast again", once(one), one) == []


def test_weights_that_were_initialized_meanwhile_are_no_activations() -> None:
    with explain() as explained:
        net = Two(torch.relu)
        for _ in range(3):
            once(net)()
    assert [one.kind for one in explained.report.warnings] == ["weight cast again"]


def test_pieces_of_a_result_that_ops_cast_are_not_found() -> None:
    def attend(x: Tensor) -> Tensor:
        q, k, v = x.float().repeat(1, 3).chunk(3, -1)
        return (q @ k.T) @ v

    net = Two(attend)
    with explain(model=net) as explained:
        once(net)()
    products = [record for record in explained.report.records if record.op == "aten::matmul"]
    assert [len(record.casts) for record in products] == [2, 1]
    assert "activation cast again" not in {finding.kind for finding in explained.report.warnings}


def test_a_gradients_casts_are_not_found() -> None:
    up = op("_to_copy", 0, rule="cast", came="bfloat16", gave="float32", phase="backward", autocast=None)
    down = op(
        "_to_copy", 1, rule="cast", came="float32", gave="bfloat16", phase="backward", producers=(0,), autocast=None
    )
    assert kinds(up, down) == []


def test_layers_that_cast_up_and_down_are_one_finding() -> None:
    ops = []
    for layer in range(3):
        path = f"layers.{layer}.norm"
        ops += [
            op("_to_copy", 2 * layer, rule="cast", came="bfloat16", gave="float32", path=path),
            op(
                "linear",
                2 * layer + 1,
                rule="lower_precision_fp",
                came="float32 float32",
                used="bfloat16 bfloat16",
                gave="bfloat16",
                producers=(2 * layer, -1),
                path=f"layers.{layer}.proj",
                line=2,
            ),
        ]
    finding = only("redundant casts", *ops)
    assert (finding.path, finding.count) == (("layers.*.norm",), 3)
    assert "in 'layers.*.norm' and back to bfloat16 by linear in 'layers.*.proj'" in finding.message
    assert finding.message.count("6 casts") == 1


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_tensors_of_rare_dtypes_do_not_end_the_findings(dtype: torch.dtype) -> None:
    def made() -> Tensor:
        if dtype.is_complex:
            return torch.randn(4, 4, dtype=torch.complex64).to(dtype).conj().real
        return torch.quantize_per_tensor(torch.rand(4, 4), 0.1, 0, dtype).clone().dequantize()

    with explain() as explained, torch.autocast("cpu", dtype=torch.float16):
        torch.log(made().half() * 0 + 1e-8)
    assert [finding.kind for finding in explained.report.warnings] == ["eps lost"]
    element = (
        torch.empty(1, dtype=dtype) if dtype.is_complex else torch.quantize_per_tensor(torch.rand(1), 0.1, 0, dtype)
    )
    assert itemsize(str(dtype).removeprefix("torch.")) == element.element_size()


def test_a_dtype_whose_elements_have_no_known_size_has_no_cast_twice() -> None:
    assert itemsize("key<fry>") == 0
    assert kinds(op("clone", came="key<fry>", gave="key<fry>")) == []
