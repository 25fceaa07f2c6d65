"""Find the ops that fail over dtypes in TensorPlay, or are silently wrong, and write them to ``repairs.csv``.

    python scripts/tensorplay_repairs.py            # write src/mezzo/tables/tensorplay/repairs.csv
    python scripts/tensorplay_repairs.py --check    # write nothing; status 1 if the table is not what this release needs
    python scripts/tensorplay_repairs.py --report notes.md

Outside autocast, each call is made with its float tensors in all dtypes, alike and mixed, forward and backward, and compared
with the same numbers in the widest of these dtypes (float32 at least). A mixed call that raises is to be promoted; one that
kills the interpreter, gives wrong numbers, or loses or spoils gradients, is to be promoted first. What writes into its
first tensor takes that one's dtype. A low dtype in which a call with all its tensors fails in one of these ways is lacking.
The calls are made in child processes, since mixed convolutions read past the end of their inputs. It takes ten minutes.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections import Counter
from pathlib import Path

import tensorplay
from tensorplay_samples import all_calls
from tensorplay_trials import LOW, WIDTH, Trial, attempt, difference, float_count, in_child, mixes
from tests.tensorplay.op_samples import Call

TARGET = Path(__file__).parent.parent / "src" / "mezzo" / "tables" / "tensorplay" / "repairs.csv"
EPSILON = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
ROOMY = 40  # roundings of the lowest dtype that a result may be away; what is wrong is off by its own size and more
LARGE = 1e4  # beyond it float16 may overflow, which is no fault
# What is wrong here is the samples' doing: they draw numbers, leave memory as it is, move their own input, are next to a
# pole, or have gradients beyond float16 or with nothing left of them but rounding.
UNFIT = frozenset(
    [
        "bernoulli",
        "normal",
        "normal_",
        "randn_like",
        "uniform_",
        "rrelu_with_noise",
        "new_empty",
        "new_empty_strided",
        "empty_like",
        "matmul",
        "t_",
        "transpose_",
        "histc",
        "div",
        "div_",
        "pow",
        "tanh",
        "selu",
        "sinc",
        "erfcx",
        "softmax",
        "tp_soft_margin_loss",
        "lgamma",
        "lgamma_",
        "embedding",
        "float_power",
        "baddbmm",
        "conv_transpose2d",
        "conv_transpose3d",
    ]
)
# Not all of their second result is filled, so its numbers are not looked at.
PARTLY_FILLED = frozenset(("_ctc_loss", "linalg_qr"))
# In low dtypes the results of the two attentions have no gradient, where those in float32 have; nextafter, which looks at
# the bits of its inputs, ends the interpreter now and then; the next three find neither Inf nor NaN, and no sample has one;
# three overflow inside, for tensors whose count or sum of squares float16 does not hold; and fix rounds nothing.
BY_HAND = {
    "nextafter": LOW,
    "_native_multi_head_attention": LOW,
    "_scaled_dot_product_attention_math": LOW,
    "isfinite": LOW,
    "isinf": LOW,
    "nan_to_num": LOW,
    "mean": ("float16",),
    "linalg_norm": ("float16",),
    "linalg_vector_norm": ("float16",),
    "fix": LOW,
}


def faults(call: Call, mix: tuple[str, ...]) -> list[str]:
    """Make a call in a mix of dtypes and say what is wrong.

    Args:
        call: The call.
        mix: The dtype of each of its float tensors.

    Returns:
        Of "raises", "values", "backward", "gradients" those that apply; a child that makes the call may die of it.
    """
    found = attempt(call, mix)
    wide = "float64" if "float64" in mix else "float32"
    wanted = attempt(call, mix, wide=wide)
    if wanted.error:
        return []
    if found.error:
        return ["raises"]
    tolerance = ROOMY * max(EPSILON[dtype] for dtype in mix) + 1e-4
    spoilt = []
    if len(found.values) != len(wanted.values) or any(
        difference(a, b) > tolerance for a, b in zip(found.values, wanted.values, strict=True)
    ):
        spoilt.append("values")
    return spoilt + gradient_faults(found, wanted, mix, tolerance)


def gradient_faults(found: Trial, wanted: Trial, mix: tuple[str, ...], tolerance: float) -> list[str]:
    """Say what is wrong with gradients, as `faults` does."""
    if wanted.gradients is None:
        return []
    if found.backward:
        return ["backward"]
    if found.gradients is None:
        return ["gradients"]
    for mine, right, dtype in zip(found.gradients, wanted.gradients, mix, strict=True):
        if (mine is None) != (right is None):
            return ["gradients"]
        if mine and right and (mine[0] != dtype or difference(mine[1], right[1]) > tolerance):
            return ["gradients"]
    return []


def is_steady(call: Call) -> bool:
    """Say whether a call works in float32, and gives the same numbers, none of them large, each time."""
    one, two = (attempt(call, ("float32",) * float_count(call)) for _ in range(2))
    same = all(difference(a, b) == 0 for a, b in zip(one.values, two.values, strict=False))
    if call.op in PARTLY_FILLED:
        return not one.error
    return not one.error and same and all(abs(value[value == value]).max(initial=0) < LARGE for value in one.values)


def examine(call: Call) -> dict[tuple[str, ...], list[str]]:
    """Try a call in all mixes.

    Args:
        call: The call.

    Returns:
        Mix to what is wrong with it, ``["dies"]`` where the interpreter does.
    """
    if not in_child(is_steady, call):
        return {}
    if (found := in_child(all_faults, call)) is not None:
        return found
    return {
        mix: ["dies"] if (seen := in_child(faults, call, mix)) is None else seen for mix in mixes(float_count(call))
    }


def all_faults(call: Call) -> dict[tuple[str, ...], list[str]]:
    """Say what is wrong with a call in each mix, if none of them ends the interpreter."""
    return {mix: faults(call, mix) for mix in mixes(float_count(call))}


def row(op: str, seen: list[tuple[tuple[str, ...], str]]) -> tuple[str, str]:
    """Choose the cure of an op.

    Args:
        op: Its name.
        seen: Mixes, each with something that is wrong with it.

    Returns:
        The repair and the lacking dtypes, as the table has them.
    """
    real = [(mix, what) for mix, what in seen if not (op in UNFIT | PARTLY_FILLED and what in ("values", "gradients"))]
    mixed = {what for mix, what in real if len(set(mix)) > 1}
    lacks = {mix[0] for mix, _ in real if len(set(mix)) == 1} | set(BY_HAND.get(op, ()))
    repair = ""
    if mixed:
        repair = "promote" if mixed == {"raises"} else "promote first"
        repair = "destination" if op.endswith("_") else repair
    return repair, " ".join(dtype for dtype in LOW if dtype in lacks)


def search() -> dict[str, list[tuple[tuple[str, ...], str]]]:
    """Examine all calls.

    Returns:
        Op to mixes, each with something that is wrong with it.
    """
    found: dict[str, list[tuple[tuple[str, ...], str]]] = {}
    for op, calls in all_calls().items():
        for call in calls:
            if 0 < float_count(call) <= 12:
                for mix, wrongs in examine(call).items():
                    found.setdefault(op, []).extend((mix, what) for what in wrongs)
    return found


def report(found: dict[str, list[tuple[tuple[str, ...], str]]]) -> str:
    """Write as Markdown what the table does not say: which mixes go wrong, and how."""
    lines = ["# What is wrong with calls in these dtypes", ""]
    for op, seen in found.items():
        counted = Counter((what, max(mix, key=WIDTH.get), min(mix, key=WIDTH.get)) for mix, what in seen)
        lines += [f"- {op}: " + "; ".join(f"{what} {a}/{b} x{n}" for (what, a, b), n in sorted(counted.items()))]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the table and write nothing")
    parser.add_argument("--report", type=Path, help="also write what was seen to this file")
    options = parser.parse_args()
    found = search()
    rows = {op: row(op, found.get(op, [])) for op in {*found, *BY_HAND}}
    # A negative power is that of the inverse, which has no low kernel.
    rows |= dict.fromkeys(("matrix_power", "linalg_matrix_power"), ("promote", ""))
    # What is composed in Python does not repair its parts, once it has a rule of its own.
    rows |= {"cross_entropy_loss": ("promote first", " ".join(LOW)), "linalg_vecdot": ("promote first", "")}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["op", "repair", "lacks"])
    writer.writerows(sorted((op, *cure) for op, cure in rows.items() if any(cure)))
    if options.report:
        options.report.write_text(report(found))
    if not options.check:
        TARGET.write_text(text.getvalue())
    elif text.getvalue() != TARGET.read_text():
        unlike = {*text.getvalue().splitlines()} ^ {*TARGET.read_text().splitlines()}
        print("\n".join(sorted(unlike)))
        sys.exit(f"{TARGET} is not what tensorplay {tensorplay.__version__} needs; run scripts/tensorplay_repairs.py")


if __name__ == "__main__":
    main()
