"""Write ``src/mezzo/tables/tensorplay/ops.csv``: the ops of the installed TensorPlay, with the facts a policy needs.

TensorPlay has no schemas to read traits off, so an op that PyTorch has too gets the traits of PyTorch's, and those that
only TensorPlay has follow the rules below. Run it after moving the pin of TensorPlay:

    python scripts/tensorplay_catalog.py
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import tensorplay

from mezzo.vocabulary import base_name, vocabulary

TARGET = Path(__file__).parent.parent / "src" / "mezzo" / "tables" / "tensorplay" / "ops.csv"

# Entry points of `tensorplay._C` that the dispatcher does not list, though they compute. Those of a vendor or with a
# leading underscore are left out: they are stubs in this build, or the inside of others.
_VENDORS = re.compile(r"_|batch_norm_|choose_|cudnn_|fbgemm_|miopen_|mkldnn_|mps_|lstm_mps|nested_|quantized_|slice_")

# Of the ops that only TensorPlay has: what computes no function of its tensors that a policy's default may cover.
_NO_FUNCTION = re.compile(
    r"_|forward_|quantized_|sparse_|is_|unique$|sample$|spdiags$|native_\w+_dropout$|linalg_matrix_sqrth$"
)


def catalog() -> dict[str, frozenset[str]]:
    """List the ops of the installed TensorPlay with their traits.

    Returns:
        Names as `tensorplay._C` and `tensorplay.Tensor` have them, without overloads, to traits.
    """
    relatives = _relatives()
    native = tensorplay._C  # noqa: SLF001 - its ops live there
    listed = {base_name(op) for op in native._dispatch_ops() if "::" not in op}  # noqa: SLF001
    reachable = {op for op in listed if hasattr(native, op) or hasattr(tensorplay.Tensor, op)}
    unlisted = {
        op
        for op, traits in relatives.items()
        if op not in listed and "compute" in traits and hasattr(native, op) and not _VENDORS.match(op)
    }
    return {op: relatives.get(op, _own_traits(op)) for op in sorted(reachable | unlisted)}


def _relatives() -> dict[str, frozenset[str]]:
    """Give the traits of PyTorch's ops by base name, from all overloads but those that write to ``out``."""
    overloads: dict[str, list[frozenset[str]]] = {}
    for op, traits in vocabulary("torch").traits.items():
        if "out" not in traits:
            overloads.setdefault(base_name(op).removeprefix("aten::"), []).append(traits)
    return {base: _common(found) for base, found in overloads.items()}


def _common(overloads: list[frozenset[str]]) -> frozenset[str]:
    united = frozenset().union(*overloads)
    # Some ops, such as native_batch_norm, write into an argument by one overload only.
    return united if all("mutates" in traits for traits in overloads) else united - {"mutates"}


def _own_traits(op: str) -> frozenset[str]:
    if op.endswith("_"):
        return frozenset({"mutates"})
    if "backward" in op or "_grad_" in op or _NO_FUNCTION.match(op):
        return frozenset()
    return frozenset({"compute"})


def main() -> None:
    """Write the catalog of the installed TensorPlay."""
    with TARGET.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["op", "traits"])
        writer.writerows((op, " ".join(sorted(traits))) for op, traits in catalog().items())


if __name__ == "__main__":
    main()
