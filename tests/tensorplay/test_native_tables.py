"""Our tables for the CPU and CUDA against the autocast kernels that the package has, and what those on the CPU do."""

from __future__ import annotations

import csv
from importlib.resources import files

import pytest
import tensorplay

import mezzo.tensorplay as mt
from mezzo import tables
from mezzo.vocabulary import vocabulary
from tests.tensorplay.op_calls import CALLS
from tests.tensorplay.op_native import native_dtypes
from tests.tensorplay.op_runs import HALVES, NO_KERNEL, dtype_names, run, tensor_count

INSIDE = {
    "cpu": frozenset(
        "_euclidean_dist _foreach_mm _scaled_dot_product_attention_math _weight_norm chain_matmul corrcoef "
        "cosine_similarity cov cross_entropy_loss dist einsum gru gru_cell linalg_matmul linalg_matrix_exp "
        "linalg_matrix_power linalg_multi_dot linalg_pinv linalg_polar linalg_tensorinv linalg_tensorsolve lstm_cell "
        "matrix_exp matrix_power nll_loss_forward nll_loss_nd norm_except_dim rnn_relu rnn_relu_cell rnn_tanh "
        "rnn_tanh_cell slow_conv3d slow_conv_transpose2d tensordot thnn_conv2d".split()
    ),
    "cuda": frozenset(
        "_euclidean_dist _foreach_mm _scaled_dot_product_attention_math chain_matmul conv_transpose1d corrcoef "
        "cosine_similarity cov cross_entropy_loss gru gru_cell linalg_matmul linalg_matrix_power linalg_multi_dot linear "
        "lstm_cell matrix_power rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell slow_conv3d slow_conv_transpose2d tensordot "
        "thnn_conv2d".split()
    ),
}
"""Rows that are no autocast kernels of the package: ops that call such ops inside, which mezzo's casts do not reach."""

DOCUMENTED = frozenset(
    "nll_loss2d tp_cosine_embedding_loss tp_hinge_embedding_loss tp_kl_div tp_l1_loss tp_margin_ranking_loss "
    "tp_poisson_nll_loss tp_soft_margin_loss".split()
)
"""Rows for what public functions enter, as `F.kl_div` does ``tp_kl_div``, in the place of an op that the package lists."""

WHOLE_LAYER = "the sum with the float32 state makes the package's result float32; here the whole layer runs low"
DIFFERENT = {
    "gru": WHOLE_LAYER,
    "gru_cell": WHOLE_LAYER,
    "lstm_cell": WHOLE_LAYER,
    "rnn_relu": WHOLE_LAYER,
    "rnn_tanh": WHOLE_LAYER,
    "linalg_pinv": "the package's last product is low; a factor has no low kernel, so here all of it is float32",
    "linalg_polar": "as the pseudo-inverse",
}
"""Ops with a float32 call that gives other dtypes under the package's own autocast, and why."""


RAISES_LOW = ("linalg_pinv", "linalg_polar")
"""Ops that the package cannot run on low inputs, in a region of its own or outside."""


def listed(device: str) -> dict[str, dict[str, str]]:
    text = (files("mezzo.tables") / "tensorplay" / f"{device}.csv").read_text()
    return {row["op"]: row for row in csv.DictReader(text.splitlines())}


def kernels(device: str) -> set[str]:
    ask = tensorplay._C._dispatch_has_kernel_for_dispatch_key
    return {name.split(".")[0] for name in tensorplay._C._dispatch_ops() if ask(name, f"Autocast{device.upper()}")}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_native_rows_are_the_ops_with_an_autocast_kernel(device: str) -> None:
    native = {op for op, row in listed(device).items() if row["origin"] == "native"}
    assert native == kernels(device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_other_rows_are_ops_with_such_an_op_inside(device: str) -> None:
    by_origin = {
        origin: {op for op, row in listed(device).items() if row["origin"] == origin}
        for origin in {row["origin"] for row in listed(device).values()}
    }
    assert by_origin.keys() == {"native", "inside", "documented"}
    assert by_origin["inside"] == INSIDE[device]
    assert by_origin["documented"] == DOCUMENTED


@pytest.mark.parametrize("op", sorted(DOCUMENTED))
def test_a_documented_row_is_the_one_of_the_op_whose_function_enters_it(op: str) -> None:
    plain = op.removeprefix("tp_").removesuffix("2d")
    for device in ("cpu", "cuda"):
        assert listed(device)[op]["policy"] == listed(device)[plain]["policy"] == "fp32"
    assert op in vocabulary("tensorplay").resolve(plain)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_native_rows_have_the_rules_of_pytorchs_table(device: str) -> None:
    theirs = {op.removeprefix("aten::").split(".")[0]: str(rule) for op, rule in tables.device_table(device).items()}
    for op, row in listed(device).items():
        if row["origin"] == "native" and op != "norm":
            expected = theirs[op].replace("fp32_set_opt_dtype", "fp32")
            assert row["policy"] == expected, op


def test_norm_is_in_the_cpus_table_too_though_not_in_pytorchs() -> None:
    assert listed("cpu")["norm"]["policy"] == "fp32"
    assert not any(op.startswith("aten::norm") for op in tables.device_table("cpu"))


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("op", sorted({*listed("cpu")} - NO_KERNEL - {*DIFFERENT}))
def test_a_float32_call_gives_the_packages_own_dtypes(op: str, half: tensorplay.DType) -> None:
    ours = run(op, [tensorplay.float32], mt.autocast("cpu", dtype=half, policy="tensorplay"))
    assert dtype_names(ours) == native_dtypes(str(half).split(".")[-1], "float32")[op]


@pytest.mark.parametrize("op", sorted(DIFFERENT))
def test_the_exceptions_still_are_some(op: str) -> None:
    ours = run(op, [tensorplay.float32], mt.autocast("cpu", policy="tensorplay"))
    assert dtype_names(ours) != native_dtypes("bfloat16", "float32")[op], DIFFERENT[op]


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("op", sorted({*listed("cpu")} - NO_KERNEL - DOCUMENTED - {*RAISES_LOW}))
def test_a_low_call_gives_the_packages_own_dtypes(op: str, half: tensorplay.DType) -> None:
    ours = run(op, [half], mt.autocast("cpu", dtype=half, policy="tensorplay"))
    assert dtype_names(ours) == native_dtypes(*[str(half).split(".")[-1]] * 2)[op]


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("op", RAISES_LOW)
def test_two_products_of_factors_work_on_low_inputs_here_alone(op: str, half: tensorplay.DType) -> None:
    assert op not in native_dtypes(*[str(half).split(".")[-1]] * 2)
    with pytest.raises((TypeError, NotImplementedError), match="supported"):
        run(op, [half])
    assert set(dtype_names(run(op, [half], mt.autocast("cpu", dtype=half, policy="tensorplay")))) == {"float32"}


@pytest.mark.parametrize("op", sorted(DOCUMENTED))
def test_a_documented_row_is_one_that_the_packages_own_autocast_misses(op: str) -> None:
    ours = run(op, [tensorplay.bfloat16], mt.autocast("cpu", policy="tensorplay"))
    assert set(dtype_names(ours)) == {"float32"}
    assert "float32" not in native_dtypes("bfloat16", "bfloat16").get(op, [])


@pytest.mark.parametrize("op", [op for op, row in listed("cpu").items() if row["policy"] == "promote"])
def test_a_mixed_call_of_a_promoting_op_gives_the_packages_own_dtype(op: str) -> None:
    assert tensor_count(op) == 2
    for dtypes in ([tensorplay.bfloat16, tensorplay.float32], [tensorplay.float32, tensorplay.bfloat16]):
        native = run(op, dtypes, tensorplay.autocast("cpu"))
        ours = run(op, dtypes, mt.autocast("cpu", policy="tensorplay"))
        assert dtype_names(ours) == dtype_names(native) == ["float32"]


@pytest.mark.parametrize("op", sorted({*CALLS} - {*listed("cpu")} - {"nextafter", "nextafter_"}))
def test_an_op_that_is_not_listed_has_no_cast_inside_in_the_package(op: str) -> None:
    plain = run(op, [tensorplay.float32])
    native = run(op, [tensorplay.float32], tensorplay.autocast("cpu"))
    assert dtype_names(native) == dtype_names(plain)
