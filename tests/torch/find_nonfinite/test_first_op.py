"""`find_nonfinite` names the op, the module, the line and the cause, in both passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mezzo.errors import NonFiniteError, OptionError
from mezzo.report.nonfinite import NonFiniteOp
from mezzo.torch import autocast, find_nonfinite
from tests.torch.explain.nets import batch, loss_of, net


def found_in(call: Callable[[], object], low: torch.dtype = torch.float16) -> NonFiniteOp:
    with find_nonfinite() as found, autocast("cpu", dtype=low):
        call()
    assert found.report.notes == (), found.report.notes
    assert found.first is not None
    return found.first


def test_all_finite_is_said_with_the_number_of_ops() -> None:
    model = net()
    with find_nonfinite(model) as found:
        loss_of(model).backward()
    assert found.first is None
    assert found.parameters == ()
    assert str(found).endswith(" ops, all finite")
    assert found.report.ops > 60


def test_an_overflow_of_float16_is_named_with_what_float32_gives() -> None:
    first = found_in(lambda: torch.full((2, 2), 300.0) @ torch.full((2, 2), 300.0))
    assert (first.kind, first.op, first.seen_as, first.dtype, first.phase) == (
        "Inf",
        "aten::matmul",
        "aten::mm",
        "float16",
        "forward",
    )
    assert (first.inf, first.nan, first.elements) == (4, 0, 4)
    assert first.cause_kind == "range"
    assert first.cause == "in float32 the result is finite, up to 1.8e+05; float16 ends at 65504"
    assert [(one.dtype, one.low, one.high) for one in first.operands] == [("float16", 300.0, 300.0)] * 2
    assert first.source is not None
    assert first.source.file.endswith("test_first_op.py")
    assert first.rule == "lower_precision_fp in the policy 'default'"


def test_the_advice_can_be_pasted_and_cures() -> None:
    import mezzo

    def call() -> Tensor:
        return torch.full((2, 2), 300.0) @ torch.full((2, 2), 300.0)

    first = found_in(call)
    line = next(part for part in first.advice[0].splitlines() if part.startswith("policy ="))
    scope: dict[str, object] = {"mezzo": mezzo}
    exec(line, scope)
    with find_nonfinite() as found, autocast("cpu", dtype=torch.float16, policy=scope["policy"]):  # type: ignore[arg-type]
        assert call().isfinite().all()
    assert found.first is None


def test_an_input_that_does_not_survive_its_cast_is_told_as_one() -> None:
    linear = nn.Linear(2, 2)
    with find_nonfinite(nn.Sequential(linear)) as found, autocast("cpu", dtype=torch.float16):
        linear(torch.full((1, 2), 1e5))
    first = found.first
    assert first is not None
    assert (first.op, first.seen_as, first.path, first.cause_kind) == ("aten::linear", "aten::_to_copy", ("0",), "cast")
    assert first.cause == "a cast to float16, which ends at 65504, of numbers up to 100000"


@pytest.mark.parametrize(
    ("call", "op", "cause"),
    [
        (lambda: torch.zeros(2).log(), "aten::log", "log of 0"),
        ((-torch.ones(2)).log, "aten::log", "log of 0 or of numbers below"),
        (lambda: torch.ones(2) / torch.zeros(2), "aten::div", "div with 0 to divide by"),
        (lambda: torch.ones(2) / 0, "aten::div", "div with 0 to divide by"),
        (lambda: torch.zeros(2).reciprocal(), "aten::reciprocal", "reciprocal with 0 to divide by"),
        (lambda: torch.zeros(2) ** -1, "aten::pow", "pow with 0 to divide by"),
        (lambda: torch.zeros(2).rsqrt(), "aten::rsqrt", "rsqrt with 0 to divide by"),
        ((-torch.ones(2)).sqrt, "aten::sqrt", "sqrt outside of where it is defined"),
        ((-torch.ones(2)).log1p, "aten::log1p", "log1p of -1 or less"),
        ((2 * torch.ones(2)).acos, "aten::acos", "acos outside of where it is defined"),
    ],
)
def test_an_op_that_is_not_defined_there_is_told_from_a_lack_of_range(
    call: Callable[[], object], op: str, cause: str
) -> None:
    first = found_in(call)
    assert (first.op, first.cause_kind, first.cause) == (op, "domain", cause)


def test_float32_that_overflows_itself_is_not_blamed_on_precision() -> None:
    first = found_in(lambda: torch.full((2,), 1e30) * torch.full((2,), 1e30))
    assert (first.cause_kind, first.cause) == (
        "unknown",
        "float32 itself is exceeded, so a wider dtype in a policy will not help",
    )


def test_a_power_of_large_numbers_is_range_though_there_is_a_zero() -> None:
    assert found_in(lambda: torch.tensor([0.0, 300.0]).half() ** 2).cause_kind == "range"


def test_nan_in_the_data_is_told_where_it_comes_in() -> None:
    model, x = net(), batch()
    x[0, 0, 0] = float("nan")
    with find_nonfinite(model) as found:
        model(x)
    first = found.first
    assert first is not None
    assert (first.op, first.path, first.cause_kind, first.kind) == (
        "aten::native_layer_norm",
        ("blocks.0.norm",),
        "came in",
        "NaN",
    )
    assert str(first).startswith("NaN comes in to native_layer_norm of blocks.0.norm")


def test_nan_in_a_parameter_is_told_by_its_name() -> None:
    model = net()
    with torch.no_grad():
        model.blocks[1].out.weight[0, 0] = float("inf")
    with find_nonfinite(model) as found:
        loss_of(model)
    assert found.first is not None
    assert found.first.path == ("blocks.1.out",)
    assert found.first.cause == "the parameter blocks.1.out.weight has Inf already"


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
def test_a_backward_op_is_named_by_its_forward_op_and_module(low: torch.dtype) -> None:
    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: object, grad: Tensor) -> Tensor:
            return grad * float(torch.finfo(grad.dtype).max) * 4

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Steep.apply(x)  # type: ignore[no-any-return]

    model = nn.Sequential(nn.Linear(4, 4), Layer(), nn.Linear(4, 1))
    with find_nonfinite(model) as found:
        with autocast("cpu", dtype=low):
            loss = model(torch.ones(2, 4)).float().sum() * 1e3
        loss.backward()
    first = found.first
    assert first is not None
    assert (first.phase, first.path, first.op, first.rule) == ("backward", ("1",), "aten::mul", "backward of Steep")
    assert first.source is not None
    assert first.source.function == "backward"
    assert {one.name for one in found.parameters} == {"0.weight", "0.bias"}


def test_the_ops_before_are_told_in_order_and_their_number_is_the_users() -> None:
    with find_nonfinite(last=2) as found:
        (torch.zeros(2).relu() + 1 - 1).log()
    assert found.first is not None
    assert [one.op for one in found.first.before] == ["aten::add", "aten::sub"]
    with find_nonfinite(last=0) as found:
        torch.zeros(2).log()
    assert found.first is not None
    assert found.first.before == ()


def test_only_the_first_is_told_and_the_rest_runs_unwatched() -> None:
    with find_nonfinite() as found:
        torch.zeros(2).log().exp().sum()
        torch.zeros(2).reciprocal()
    assert found.first is not None
    assert found.first.op == "aten::log"
    assert found.report.ops == 2


def test_an_error_can_be_asked_for_and_stops_in_the_line() -> None:
    with (
        pytest.raises(NonFiniteError, match="-Inf first appears in log of") as caught,
        find_nonfinite(raise_error=True),
    ):
        torch.zeros(2).log()
    assert isinstance(caught.value.found, NonFiniteOp)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_in_place_ops_are_told_by_what_was_there_before() -> None:
    with find_nonfinite() as found:
        x = torch.zeros(2)
        x.add_(1).sub_(1).log_()
    assert found.first is not None
    assert (found.first.op, found.first.kind) == ("aten::log_", "-Inf")


def test_what_one_op_of_many_tensors_writes_is_looked_at() -> None:
    with find_nonfinite() as found:
        torch._foreach_mul_([torch.ones(2), torch.full((2,), 1e38)], 10.0)
    assert found.first is not None
    assert found.first.op == "aten::_foreach_mul_"


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
def test_large_sums_of_finite_numbers_are_no_finding(low: torch.dtype) -> None:
    """The quick look is a sum, which overflows by itself."""
    with find_nonfinite() as found:
        torch.full((1000,), torch.finfo(low).max, dtype=low).relu()
    assert found.first is None


def test_no_memory_that_was_never_written_is_looked_at() -> None:
    with find_nonfinite() as found:
        x = torch.empty(4)
        x.fill_(float(1))
        torch.full((4,), float("nan"), out=x)
    assert found.first is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: find_nonfinite(3), "find_nonfinite takes a model, got int: `with find_nonfinite"),  # type: ignore[arg-type]
        (lambda: find_nonfinite(last=-1), "last is a number of ops, at least 0; got -1"),
    ],
)
def test_wrong_arguments_are_told(make: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_the_derivative_of_a_root_at_zero_is_told_as_one() -> None:
    x = torch.zeros(2, requires_grad=True)
    with find_nonfinite() as found:
        x.sqrt().sum().backward()
    assert found.first is not None
    assert (found.first.op, found.first.cause) == ("aten::div", "the derivative of a root at 0 (SqrtBackward0)")


def test_a_result_that_flows_on_is_told_to_need_more_than_one_cure() -> None:
    first = found_in(lambda: torch.full((2, 2), 300.0) @ torch.full((2, 2), 300.0))
    assert any("the result does not fit float16, so what reads it next" in one for one in first.advice)


def test_the_users_own_policy_is_built_upon() -> None:
    import mezzo

    mine = mezzo.builtin_policy("default").override({"softmax": "fp32"}, name="mine")
    with find_nonfinite() as found, autocast("cpu", dtype=torch.float16, policy=mine):
        torch.full((2, 2), 300.0) @ torch.full((2, 2), 300.0)
    assert found.first is not None
    assert """policy = policy.override({"matmul": "fp32"})  # your policy 'mine'""" in found.first.advice[0]


def test_a_checkpoint_with_nan_is_told_by_the_parameter_it_goes_to() -> None:
    model, state = net(), net().state_dict()
    state["blocks.1.norm.weight"][0] = float("nan")
    for known in (None, model):
        with find_nonfinite(known) as found:
            model.load_state_dict(state)
        assert found.first is not None
        assert found.first.cause == "NaN is written into blocks.1.norm.weight, out of what no op here has made"
        model = net()


def test_two_models_are_told_apart_by_their_classes() -> None:
    class Generator(nn.Sequential):
        pass

    class Critic(nn.Sequential):
        pass

    fake, judge = Generator(nn.Linear(2, 2), nn.ReLU()), Critic(nn.Linear(2, 1), nn.Sigmoid())
    nn.init.constant_(judge[0].weight, 3.0)
    with find_nonfinite() as found:
        judge(fake(torch.ones(1, 2)))
        judge[0](torch.full((1, 2), 3e38))
    assert found.first is not None
    assert found.first.path == ("(Critic).0",)


def test_a_block_inside_of_itself_is_refused() -> None:
    found = find_nonfinite()
    with found, pytest.raises(OptionError, match="this find_nonfinite block is open already"):
        found.__enter__()
