"""Every row of the table of repairs: what TensorPlay cannot do, or does wrongly, is right inside a region."""

from __future__ import annotations

import csv
from importlib.resources import files
from typing import Any

import pytest
import tensorplay

import mezzo.tensorplay as mt
from mezzo import tables
from mezzo.policy import Policy
from tests.tensorplay.op_calls import CALLS, float_tensors, function_of, make
from tests.tensorplay.op_runs import HALVES, ROUNDING, distance, dtype_names, lacks, tensor_count

F32 = tensorplay.float32
NOTHING_LISTED = Policy("nothing listed", framework="tensorplay")
"""A policy without a rule, so that every op is reached by the dtypes that come, and is repaired."""

REPAIRS = {
    row["op"]: row["repair"]
    for row in csv.DictReader((files("mezzo.tables") / "tensorplay" / "repairs.csv").read_text().splitlines())
}
"""Op to its repair, as the file has it."""

WRITES = sorted(op for op, repair in REPAIRS.items() if repair == "destination")
MIXED = sorted(op for op, repair in REPAIRS.items() if repair.startswith("promote") and op not in WRITES)
LACKING = sorted(op for op in tables.lacking("tensorplay") if not op.endswith("_"))
NO_SAMPLE = {
    "histogramdd": "takes a tuple of integers alone",
    "normal": "draws numbers",
    **dict.fromkeys(
        ("isfinite", "isinf", "nan_to_num", "fix"), "wrong where numbers are not finite: a test of their own below"
    ),
}
"""Rows without a sample call, and why."""

RANDOM_OR_ROUGH = {
    "linalg_eig": "vectors of any length and sign",
    "linalg_eigh": "signs are free",
    "linalg_qr": "the lower triangle of its second result is not filled, in this release",
    "_ctc_loss": "its second result has places that are not filled",
}
"""Ops whose numbers are not compared, and why."""

NARROW = {
    "_native_multi_head_attention": "the region's",
    "batch_norm": "that of the input",
    "native_batch_norm": "that of the input; float32 statistics",
    "rotary_embedding": "that of the input",
    "scatter": "that of what is scattered into",
}
"""Ops that work natively on some mixes, with a result of another dtype than the widest."""


def attempt(op: str, dtypes: list[Any], half: Any, *, grad: bool = False) -> tuple[list[Any], list[Any]]:
    """Make a call in a region where no op is listed."""
    args, kwargs, leaves = make(CALLS[op], dtypes, grad=grad)
    with mt.autocast("cpu", dtype=half, policy=NOTHING_LISTED):
        return float_tensors(function_of(op)(*args, **kwargs)), leaves


def wide(op: str, dtype: Any = F32) -> list[Any]:
    """Make the call in one wide dtype, outside any region."""
    args, kwargs, _ = make(CALLS[op], [dtype])
    return float_tensors(function_of(op)(*args, **kwargs))


def assert_close(op: str, found: list[Any], wanted: list[Any], half: Any) -> None:
    """Compare numbers; the samples are exact in bfloat16, or are rounded by its half at most."""
    assert len(found) == len(wanted)
    for mine, right in zip(found, wanted, strict=True):
        if op not in RANDOM_OR_ROUGH:
            # 16 roundings of the inputs: amplified by the condition of what is solved or inverted.
            assert distance(mine, right) <= 16 * ROUNDING[str(half).split(".")[-1]]


def test_there_is_a_sample_call_for_each_row() -> None:
    assert {*REPAIRS} - {*CALLS} == {*NO_SAMPLE}


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("op", [op for op in MIXED if op not in NO_SAMPLE and tensor_count(op) > 1])
def test_a_mixed_call_gives_the_numbers_of_a_float32_call(op: str, half: Any) -> None:
    right = wide(op)
    for dtypes in ([half, F32], [F32, half]):
        found, _ = attempt(op, dtypes, half)
        if op not in NARROW:
            assert set(dtype_names(found)) <= {"float32"}, dtypes
        assert_close(op, found, right, half)


@pytest.mark.parametrize(
    ("op", "half"),
    [(op, half) for op in LACKING if op not in NO_SAMPLE for half in HALVES if lacks(op, str(half).split(".")[-1])],
    ids=str,
)
def test_a_low_call_without_a_kernel_runs_in_float32(op: str, half: Any) -> None:
    found, _ = attempt(op, [half], half)
    assert set(dtype_names(found)) <= {"float32"}
    assert_close(op, found, wide(op), half)


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("op", WRITES)
def test_a_mixed_call_that_writes_keeps_the_dtype_of_what_it_writes_to(op: str, half: Any) -> None:
    right = wide(op)
    for dtypes, kept in (([half, F32], half), ([F32, half], F32)):
        found, leaves = attempt(op, dtypes, half)
        assert dtype_names(found) == dtype_names([leaves[0]]) == [str(kept).split(".")[-1]]
        assert distance(leaves[0], found[0]) == 0
        assert_close(op, found, right, half)


@pytest.mark.parametrize("op", ["addmm", "conv2d", "layer_norm", "index_add", "prelu", "rms_norm", "linear", "lstm"])
def test_float64_among_the_inputs_makes_the_call_one_of_float64(op: str) -> None:
    found, _ = attempt(op, [F32, tensorplay.float64], tensorplay.bfloat16)
    assert set(dtype_names(found)) == {"float64"}
    for mine, right in zip(found, wide(op, tensorplay.float64), strict=True):
        assert distance(mine, right) < 1e-12


def test_the_table_holds_what_kills_the_interpreter() -> None:
    deadly = "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d grid_sampler_2d".split()
    assert {op: REPAIRS[op] for op in deadly} == dict.fromkeys(deadly, "promote first")


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("op", ["isfinite", "isinf", "nan_to_num", "fix"])
def test_what_looks_for_numbers_that_are_not_finite_or_whole_finds_them_in_low_inputs(op: str, half: Any) -> None:
    numbers = tensorplay.tensor([1.5, float("inf"), float("-inf"), float("nan")])
    right = getattr(tensorplay, op)(numbers).tolist()
    assert getattr(tensorplay, op)(numbers.to(half)).tolist() != right, (
        "outside of regions: TensorPlay 1.0.0's own fault"
    )
    with mt.autocast("cpu", dtype=half):
        assert str(getattr(tensorplay, op)(numbers.to(half)).tolist()) == str(right)  # nan is unequal to itself


LARGE = {
    "mean": lambda x: x.mean(),
    "linalg_norm": lambda x: tensorplay.linalg.norm(x.flatten()),
    "linalg_vector_norm": lambda x: tensorplay.linalg.vector_norm(x.flatten()),
}


@pytest.mark.parametrize("op", LARGE)
def test_what_overflows_in_float16_in_the_midst_of_a_large_tensor_is_computed_in_float32(op: str) -> None:
    ones = tensorplay.ones(70_000, dtype=tensorplay.float16)  # float16 ends at 65504
    right = 1.0 if op == "mean" else 70_000**0.5
    assert not float(LARGE[op](ones)) < 1e4, "outside of regions it is inf or nan: TensorPlay 1.0.0's own fault"
    for policy in ("default", "unified"):
        with mt.autocast("cpu", dtype=tensorplay.float16, policy=policy):
            assert float(LARGE[op](ones)) == pytest.approx(right, rel=1e-6)


# What a call writes into

STATISTICS = {
    "batch_norm": lambda *args: tensorplay.nn.functional.batch_norm(*args, training=True),
    "instance_norm": lambda *args: tensorplay.nn.functional.instance_norm(*args, use_input_stats=True),
}


@pytest.mark.parametrize("rule", ["fp32", "lower_precision_fp", "promote", None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", STATISTICS)
def test_running_statistics_are_updated_where_the_caller_has_them(op: str, dtype: str, rule: str | None) -> None:
    rules = {} if rule is None else {op: rule}
    x = tensorplay.arange(24).to(F32).reshape(2, 3, 4)

    def statistics(kind: Any) -> tuple[Any, Any]:
        return tensorplay.zeros(3, dtype=kind), tensorplay.ones(3, dtype=kind)

    right, found = statistics(F32), statistics(getattr(tensorplay, dtype))
    STATISTICS[op](x, *right)
    with mt.autocast("cpu", policy=Policy("mine", rules, framework="tensorplay")):
        STATISTICS[op](x.to(tensorplay.bfloat16) if rule is None else x, *found)
    for mine, theirs in zip(found, right, strict=True):
        assert str(mine.dtype) == f"tensorplay.{dtype}"
        assert float(theirs.abs().max()) > 1.0
        # The input is exact in bfloat16; its moments, and the update, are rounded a few times.
        assert float((mine.to(F32) - theirs).abs().max() / theirs.abs().max()) < 2**-6


def test_a_call_with_out_writes_there_or_raises_as_outside() -> None:
    x = tensorplay.ones(1, 1, 4, 4, dtype=tensorplay.bfloat16)
    out = tensorplay.zeros(1, 1, 2, 2)
    with mt.autocast("cpu"), pytest.raises((RuntimeError, TypeError, NotImplementedError)):
        tensorplay._C.avg_pool2d(x, [2, 2], out=out)
    with mt.autocast("cpu"):
        tensorplay._C.avg_pool2d(x.to(F32), [2, 2], out=out)
    assert out.tolist() == [[[[1.0, 1.0], [1.0, 1.0]]]]


NAN = float("nan")
BETA_ZERO: dict[str, Any] = {
    "baddbmm": ((2, 4, 4), lambda x, low: ((2, 4, 4), (2, 4, 4))),
    "addbmm": ((4, 4), lambda x, low: ((2, 4, 4), (2, 4, 4))),
    "addr": ((4, 3), lambda x, low: ((4,), (3,))),
}


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("policy", ["default", "unified"])
@pytest.mark.parametrize("how", ["positional", "keywords", "in place"])
@pytest.mark.parametrize("op", BETA_ZERO)
def test_what_beta_zero_says_to_ignore_is_ignored(op: str, how: str, policy: str, half: Any) -> None:
    tensorplay.manual_seed(0)
    shape, operands = BETA_ZERO[op]
    left, right = (tensorplay.rand(size) for size in operands(None, None))
    first, second = ("vec1", "vec2") if op == "addr" else ("batch1", "batch2")
    product = {
        "baddbmm": lambda: left @ right,
        "addbmm": lambda: (left @ right).sum(0),
        "addr": lambda: left.unsqueeze(1) * right.unsqueeze(0),
    }[op]()
    with mt.autocast("cpu", dtype=half, policy=policy):
        for _ in range(5):  # what uninitialised memory holds is not always wrong
            if how == "in place":
                target = tensorplay.full(shape, NAN).to(half)
                found = getattr(target, f"{op}_")(left.to(half), right.to(half), beta=0, alpha=0.5)
                assert found.data_ptr() == target.data_ptr()
            elif how == "keywords":
                named = {first: left, second: right}
                found = getattr(tensorplay._C, op)(tensorplay.full(shape, NAN), beta=0, alpha=0.5, **named)
            else:
                found = getattr(tensorplay, op)(tensorplay.full(shape, NAN), left, right, beta=0, alpha=0.5)
            assert distance(found, product * 0.5) <= 8 * ROUNDING[str(half).split(".")[-1]]


def test_a_call_that_is_refused_leaves_what_it_was_to_write_to() -> None:
    target = tensorplay.ones(2, 4, 4, dtype=tensorplay.bfloat16)
    banned = Policy("strict", {"baddbmm_": "banned"}, framework="tensorplay")
    with mt.autocast("cpu"), pytest.raises((RuntimeError, ValueError)):
        target.baddbmm_(tensorplay.ones(2, 4, 3).to(target.dtype), tensorplay.ones(2, 4, 4).to(target.dtype), beta=0)
    with mt.autocast("cpu", policy=banned), pytest.raises(RuntimeError, match="baddbmm_ is banned"):
        target.baddbmm_(target, target, beta=0)
    assert bool((target == 1).all())


def test_operands_of_a_wrong_shape_get_the_ops_own_error() -> None:
    def message() -> str:
        with pytest.raises((RuntimeError, ValueError, IndexError, TypeError)) as caught:
            tensorplay.baddbmm(tensorplay.ones(2, 2), tensorplay.ones(2), tensorplay.ones(2), beta=0)
        return str(caught.value)

    outside = message()
    with mt.autocast("cpu"):
        assert message() == outside


def test_statistics_are_not_rounded_by_a_rule_that_lowers() -> None:
    layer = tensorplay.nn.BatchNorm1d(2)
    layer.running_mean.fill_(1.001)
    policy = Policy("low", {"batch_norm": "lower_precision_fp"}, framework="tensorplay")
    before = layer.running_mean.tolist()
    with mt.autocast("cpu", policy=policy):
        layer.eval()(tensorplay.ones(4, 2))
        assert layer.running_mean.tolist() == before
        layer.train()(tensorplay.full((4, 2), 3.0))
    assert layer.running_mean.tolist() == pytest.approx([0.9 * 1.001 + 0.3] * 2, abs=1e-5)


@pytest.mark.parametrize("policy", ["default", "unified"])
def test_a_cross_entropy_of_mixed_dtypes_is_right(policy: str) -> None:
    logits, weight, classes = tensorplay.randn(6, 4), tensorplay.rand(4) + 0.5, tensorplay.arange(6) % 4
    loss = tensorplay.nn.functional.cross_entropy
    right = float(loss(logits, classes, weight))
    f64, low = tensorplay.float64, tensorplay.bfloat16
    with mt.autocast("cpu", policy=policy):
        for mix in ((logits.to(f64), weight), (logits, weight.to(f64)), (logits.to(f64), weight.to(low))):
            found = float(tensorplay.nn.functional.cross_entropy(mix[0], classes, mix[1]))
            assert found == pytest.approx(right, rel=2**-8)  # a weight that was rounded to bfloat16


def test_a_low_tensor_that_is_written_to_has_the_gradient_of_what_is_written_alone() -> None:
    leaf, row = tensorplay.ones(3).to(tensorplay.bfloat16).requires_grad_(), tensorplay.ones(4)
    with mt.autocast("cpu"):
        out = (leaf * 1).addmv_(tensorplay.ones(3, 4), row)
    out.float().sum().backward()
    assert [out.float().tolist(), leaf.grad.float().tolist()] == [[5.0] * 3, [1.0] * 3]


def test_a_negative_power_of_a_matrix_runs_in_float32() -> None:
    matrix = tensorplay.eye(3) * 2
    with mt.autocast("cpu"):
        for function in (tensorplay.matrix_power, tensorplay.linalg.matrix_power):  # looked up in the region
            assert function(matrix, -1).float().tolist() == (tensorplay.eye(3) * 0.5).tolist()
