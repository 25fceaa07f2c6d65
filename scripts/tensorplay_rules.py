"""Measure what TensorPlay's own autocast does with each op on the CPU, and write ``cpu.csv``, ``cuda.csv``, ``unified.csv``.

    python scripts/tensorplay_rules.py            # write src/mezzo/tables/tensorplay/{cpu,cuda,unified}.csv
    python scripts/tensorplay_rules.py --check    # write nothing; status 1 if the tables are not what this release does

The package says which ops have an autocast kernel; what the kernel does is seen from the dtypes that calls give under
``tensorplay.autocast("cpu")`` and outside. Ops without such a kernel of which the result or its numbers change there have
ops inside that do: mezzo's casts do not reach inside an op, so these have a rule of their own (``inside``). Kernels for
CUDA cannot be run here; each is taken to follow PyTorch's CUDA table for the op of the same name. The unified table is
PyTorch's too, with what it comes to for ops that only TensorPlay has. It takes about six minutes.
"""
# ruff: noqa: SLF001 - TensorPlay's ops live in tensorplay._C

from __future__ import annotations

import argparse
import csv
import io
import sys
from pathlib import Path

import tensorplay
from tensorplay_samples import OPS, all_calls
from tensorplay_trials import LOW, Trial, attempt, difference, float_count, in_child
from tests.tensorplay.op_samples import Call

from mezzo import tables
from mezzo.builtin import builtin_policy

FOLDER = Path(__file__).parent.parent / "src" / "mezzo" / "tables" / "tensorplay"
LOWER, FP32, PROMOTE = "lower_precision_fp", "fp32", "promote"
SAME = 1e-5  # what float32 results may differ by from call to call, relative to the largest number
# Of these no rule gives what happens inside. The pseudo-inverse and the polar decomposition have a product of factors of
# which there is no kernel for low dtypes; the exponential casts products and adds in float32. The joins cast only what has
# the other low dtype. Tensors that are not filled have other numbers at each call.
BY_HAND = {
    **dict.fromkeys(("empty_like", "new_empty", "new_empty_strided"), ""),
    "linalg_pinv": FP32,
    "linalg_polar": FP32,
    "matrix_exp": FP32,
    "linalg_matrix_exp": FP32,
    **dict.fromkeys(("cartesian_prod", "column_stack", "dstack", "gradient", "hstack", "vstack"), ""),
    # They write into their first tensor, and PyTorch does not list them.
    **dict.fromkeys(("addbmm_", "addmm_", "baddbmm_"), ""),
}
# On CUDA, as far as can be told here: those with a product inside, by the same op inside, and those that end in an op of
# the list. No autocast kernel: a linear layer there is made of addmm and matmul.
INSIDE_ON_CUDA = {"linear": LOWER, "conv_transpose1d": LOWER, "cosine_similarity": FP32, "cross_entropy_loss": FP32}
# Ops that PyTorch does not have or reaches in another way: what it gives for the public function that comes to them.
UNIFIED = {
    # Products all the way through, or so in PyTorch.
    **dict.fromkeys(("cov", "corrcoef", "matrix_power", "linalg_matrix_power", "linalg_matmul", "conv2d_relu"), LOWER),
    **dict.fromkeys(("gru", "lstm", "rnn_relu", "rnn_tanh", "_scaled_dot_product_attention_math"), LOWER),
    # `inner` is a tensordot in PyTorch; `grid_sample` comes to these two at once here, and PyTorch's own op promotes.
    **dict.fromkeys(("inner", "grid_sampler_2d", "grid_sampler_3d"), PROMOTE),
    # Second names of ops that are listed.
    **dict.fromkeys(("arctan2", "concat", "concatenate"), PROMOTE),
    **dict.fromkeys(("arccos", "arcsin", "special_erfinv", "special_expm1", "special_log1p"), FP32),
    **dict.fromkeys(("special_softmax", "special_log_softmax", "special_logsumexp", "_safe_softmax"), FP32),
    **dict.fromkeys(("linalg_norm", "norm_except_dim", "pairwise_distance", "matrix_exp", "linalg_pinv"), FP32),
    # The losses and paddings under the names by which the public functions reach them.
    **dict.fromkeys(("tp_l1_loss", "tp_kl_div", "tp_hinge_embedding_loss", "tp_margin_ranking_loss"), FP32),
    **dict.fromkeys(("tp_poisson_nll_loss", "tp_soft_margin_loss", "tp_cosine_embedding_loss"), FP32),
    **dict.fromkeys(("_ctc_loss", "nll_loss_nd", "multilabel_soft_margin_loss"), FP32),
    **dict.fromkeys(("reflection_pad_nd", "replication_pad_nd"), FP32),
}


def kernels(device: str) -> set[str]:
    """Name the ops that have an autocast kernel of the package.

    Args:
        device: "CPU" or "CUDA".

    Returns:
        Base names.
    """
    ask = tensorplay._C._dispatch_has_kernel_for_dispatch_key
    return {name.split(".")[0] for name in tensorplay._C._dispatch_ops() if ask(name, f"Autocast{device}")}


def plain_rule(rule: str) -> str:
    """Give the rule that stands for one of PyTorch's where dtype arguments are not set: that is float32."""
    return FP32 if rule in ("fp32_set_opt_dtype", "fp32_append_dtype") else rule


def of_torch(device: str) -> dict[str, str]:
    """Give PyTorch's table by base name."""
    found = {op.removeprefix("aten::").split(".")[0]: rule for op, rule in tables.device_table(device).items()}
    return {op: plain_rule(str(getattr(rule, "value", rule))) for op, rule in found.items()}


def seen(call: Call) -> set[str]:
    """Say which rules the package's own autocast shows at a call.

    Args:
        call: The call.

    Returns:
        Rules of which something was seen; empty where it does nothing.
    """
    count = float_count(call)
    wide = ("float32",) * count
    base, again = (attempt(call, wide, grad=False) for _ in range(2))
    if base.error or differs(again, base):
        return set()
    found: set[str] = set()
    for low, other in (LOW, LOW[::-1]):
        here = attempt(call, wide, region=low, grad=False)
        if low in here.dtypes and low not in base.dtypes:
            found.add(LOWER)
        elif not here.error and differs(here, base):
            found.add("inside")
        alone, under = attempt(call, (low,) * count, grad=False), attempt(call, (low,) * count, region=low, grad=False)
        if under.dtypes == base.dtypes and under.dtypes != alone.dtypes:
            found.add(FP32)
        if count > 1 and LOWER not in found:
            mix = (low,) + ("float32",) * (count - 1)
            strange = attempt(call, (other,) * count, region=low, grad=False).dtypes
            if (
                low in strange
                or attempt(call, mix, region=low, grad=False).dtypes != attempt(call, mix, grad=False).dtypes
            ):
                found.add(PROMOTE)
    return found


def differs(found: Trial, wanted: Trial) -> bool:
    """Say whether two results are not the same numbers."""
    return len(found.values) != len(wanted.values) or any(
        difference(a, b) > SAME for a, b in zip(found.values, wanted.values, strict=True)
    )


def measured() -> dict[str, set[str]]:
    """Measure every op that can be called.

    Returns:
        Op to the rules that its calls have shown.
    """
    found: dict[str, set[str]] = {}
    for op, calls in all_calls().items():
        for call in calls[:4]:
            if 0 < float_count(call) <= 12:
                found.setdefault(op, set()).update(in_child(seen, call) or ())
    return found


# What public functions enter in the place of ops that are listed: the package's own kernels do not see them, and the table
# that it documents names the function.
DOCUMENTED = dict.fromkeys(
    [
        "nll_loss2d",
        "tp_cosine_embedding_loss",
        "tp_hinge_embedding_loss",
        "tp_kl_div",
        "tp_l1_loss",
        "tp_margin_ranking_loss",
        "tp_poisson_nll_loss",
        "tp_soft_margin_loss",
    ],
    (FP32, "documented"),
)


def cpu_table(found: dict[str, set[str]]) -> dict[str, tuple[str, str]]:
    """Make the CPU's table: op to rule and origin."""
    native, torch = kernels("CPU"), of_torch("cpu")
    rows = {}
    for op in native:
        shown = found.get(op, set()) - {"inside"}
        # An index copy promotes, and no more can be seen of what computes in float32 anyway.
        rule = next((rule for rule in (LOWER, FP32, PROMOTE) if rule in shown), "")
        expected = torch.get(op, FP32)
        if rule and rule != expected:
            print(f"{op}: {sorted(shown)} on the CPU, {expected} in PyTorch's table")
        rows[op] = (rule or expected, "native")
    for op, shown in found.items():
        rule = next((rule for rule in (LOWER, FP32) if rule in shown), LOWER if "inside" in shown else "")
        rule = BY_HAND.get(op, rule)
        if op not in native and rule and shown:
            rows[op] = (rule, "inside")
    return {**DOCUMENTED, **rows}


def cuda_table(cpu: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Make the table for CUDA: op to rule and origin."""
    native, torch = kernels("CUDA"), of_torch("cuda")
    rows = {op: (torch[op], "native") for op in native}
    products = {op: rule for op, (rule, origin) in cpu.items() if origin == "inside" and rule == LOWER}
    inside = {op: (rule, "inside") for op, rule in {**products, **INSIDE_ON_CUDA}.items()}
    return {**DOCUMENTED, **inside, **rows}


def unified_table() -> dict[str, str]:
    """Make the unified table: op to rule."""
    listed = {op.removeprefix("aten::").split(".")[0]: rule for op, rule in builtin_policy("unified").ops.items()}
    rules = {op: plain_rule(str(getattr(rule, "value", rule))) for op, rule in listed.items() if op in OPS}
    return {**{op: rule for op, rule in rules.items() if rule in (LOWER, FP32, PROMOTE, "banned")}, **UNIFIED}


def written(columns: list[str], rows: list[tuple[str, ...]]) -> str:
    """Write a table as text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([columns, *sorted(rows)])
    return text.getvalue()


def main() -> None:
    """Write the tables, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the tables and write nothing")
    check = parser.parse_args().check
    cpu = cpu_table(measured())
    texts = {
        "cpu": written(["op", "policy", "origin"], [(op, *row) for op, row in cpu.items()]),
        "cuda": written(["op", "policy", "origin"], [(op, *row) for op, row in cuda_table(cpu).items()]),
        "unified": written(["op", "policy"], list(unified_table().items())),
    }
    for name, text in texts.items():
        target = FOLDER / f"{name}.csv"
        if not check:
            target.write_text(text)
        elif text != target.read_text():
            sys.exit(f"{target} is not what tensorplay {tensorplay.__version__} does; run scripts/tensorplay_rules.py")


if __name__ == "__main__":
    main()
