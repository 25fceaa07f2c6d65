"""Make the calls of PyTorch's op database with mixed dtypes, in its autocast and in mezzo's, and write down which raise.

    python scripts/sweep_dtypes.py docs/mixed-dtypes.md

Each call is made with its float tensors in every pairing of float32, bfloat16, float16 and float64 (one tensor, or the
place that is written to, unlike the rest), in a bfloat16 region. A call counts if it works with all of its tensors in the
widest of the dtypes, so that an error is one of dtypes. A call that works under ``torch.autocast`` must give the same dtypes
and, to the last bit, the same values under mezzo; a repaired one the dtypes that the widest inputs give. It takes minutes.
"""

from __future__ import annotations

import argparse
import platform
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mixed_calls import Call, Mix, all_calls, run, variants
from recording_kernels import floats, widest
from torch import Tensor
from torch.utils._pytree import tree_leaves

import mezzo.torch

Region = Callable[[], AbstractContextManager[Any]]

SHORT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}

REASONS = {
    "linalg.pinv.singular": "the product in it works with an empty tensor, in bfloat16, as in PyTorch",
    "nn.functional.linear_cross_entropy.chunked": "PyTorch sums the chunks in float32",
    "nn.functional.multi_head_attention_forward": "only the value is float64; the weights of attention do not depend on it",
}

# Calls whose results are memory that nobody has written.
UNDEFINED = ("empty", "new_empty", "resize")


@dataclass
class Sweep:
    """What came of the calls.

    Attributes:
        calls: Mixed calls that count.
        torch_raises: By op, those that raise under ``torch.autocast``.
        mezzo_raises: The same under mezzo.
        pairs: By pairing, calls that raise under ``torch.autocast`` and under mezzo.
        left: What raises under mezzo: name and text, to the number of calls.
        differing: Calls that work in both and differ.
        narrow: Calls that are repaired, and give another dtype than with all tensors in the widest one.
    """

    calls: int = 0
    ops: set[str] = field(default_factory=set)
    torch_raises: Counter[str] = field(default_factory=Counter)
    mezzo_raises: Counter[str] = field(default_factory=Counter)
    pairs: dict[str, list[int]] = field(default_factory=dict)
    left: Counter[tuple[str, str]] = field(default_factory=Counter)
    differing: list[str] = field(default_factory=list)
    narrow: list[str] = field(default_factory=list)


def sweep(calls: Iterator[Call], low: torch.dtype = torch.bfloat16) -> Sweep:
    """Make the calls.

    Args:
        calls: The calls.
        low: The dtype of the regions.

    Returns:
        What came of them.
    """
    found = Sweep()
    for call in calls:
        for mix in variants(call):
            if len(_dtypes(mix)) > 1 and not isinstance(wide := _wide(call, mix, low), Exception):
                _compare(call, mix, low, wide, found)
    return found


def _dtypes(mix: Mix) -> set[torch.dtype]:
    return {*mix[0], *([mix[1]] if mix[1] else [])}


def _wide(call: Call, mix: Mix, low: torch.dtype) -> Any:
    """Make the call with all tensors in the dtype that a repair would cast to."""
    target = mix[1] or (mix[0][0] if call.in_place else widest(_dtypes(mix)))
    wide = (target,) * len(mix[0]), mix[1] and target
    with torch.autocast("cpu", dtype=low):
        given = run(call, wide)
    if not isinstance(given, Exception) or target.itemsize > 2:
        return given
    # A kernel that lacks the low dtype of a destination: mezzo goes through float32.
    return run(call, ((torch.float32,) * len(mix[0]), mix[1] and torch.float32))


def _compare(call: Call, mix: Mix, low: torch.dtype, wide: Any, found: Sweep) -> None:
    found.calls += 1
    found.ops.add(call.name)
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=low):
        theirs = run(call, mix)
    torch.manual_seed(0)
    with mezzo.torch.autocast("cpu", dtype=low, policy="default"):
        ours = run(call, mix)
    pair = found.pairs.setdefault(" + ".join(sorted(SHORT[dtype] for dtype in _dtypes(mix))), [0, 0, 0])
    pair[0] += 1
    if isinstance(theirs, Exception):
        found.torch_raises[call.name] += 1
        pair[1] += 1
    if isinstance(ours, Exception):
        found.mezzo_raises[call.name] += 1
        pair[2] += 1
        found.left[call.name, str(ours).splitlines()[0]] += 1
    elif isinstance(theirs, Exception):
        written = call.in_place or call.outs
        if not written and [t.dtype for t in floats(ours)] != [t.dtype for t in floats(wide)]:
            found.narrow.append(f"{call.name} {mix}")
    elif not call.name.startswith(UNDEFINED) and not _same(theirs, ours):
        found.differing.append(f"{call.name} {mix}")


def _same(theirs: Any, ours: Any) -> bool:
    pairs = list(zip(tree_leaves(theirs), tree_leaves(ours), strict=True))
    return all(_equal(one, other) for one, other in pairs if isinstance(one, Tensor))


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.dtype is not other.dtype or one.layout is not other.layout:
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return bool(torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)))


def page(found: Sweep) -> str:
    """Write the results as a page of the documentation."""
    narrow = [
        f"* `{name}` ({count}): {REASONS.get(name, 'not looked into')}"
        for name, count in sorted(Counter(text.split(" ((")[0] for text in found.narrow).items())
    ]
    lines = [
        "# Mixed dtypes",
        "",
        "Written by `scripts/sweep_dtypes.py`. What is compared: the calls of PyTorch's op database, functional, in place",
        "and with `out=`, recurrent nets and sparse tensors, each with its float tensors in mixed dtypes, in a bfloat16",
        "region on the CPU. A call counts if it works with all of its tensors in one dtype.",
        "",
        f"torch {torch.__version__}, python {platform.python_version()}, {platform.machine()}.",
        "",
        f"* {found.calls} calls of {len(found.ops)} functions",
        f"* under `torch.autocast` {found.torch_raises.total()} raise, in {len(found.torch_raises)} functions",
        f"* under mezzo's default policy {found.mezzo_raises.total()} raise, in {len(found.mezzo_raises)} functions",
        f"* {len(found.narrow)} of the repaired calls give another dtype than with all tensors in the widest dtype",
        f"* {len(found.differing)} of the calls that work under `torch.autocast` give another dtype or value under mezzo",
        "",
        "| dtypes | calls | raise under torch.autocast | raise under mezzo |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {pair} | {' | '.join(map(str, counts))} |" for pair, counts in sorted(found.pairs.items())),
        "",
        "## What raises under mezzo",
        "",
        *([f"* `{name}` ({count}): {text}" for (name, text), count in sorted(found.left.items())] or ["Nothing."]),
        *(["", "## Repaired to another dtype", "", *narrow] if narrow else []),
        *(["", "## What differs", "", *(f"* {name}" for name in found.differing)] if found.differing else []),
        "",
        "## What raises under torch.autocast, and works under mezzo",
        "",
        "| function | calls that raise |",
        "| --- | ---: |",
        *(f"| `{name}` | {count} |" for name, count in sorted(found.torch_raises.items())),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the sweep and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="where to write the results")
    parser.add_argument("--only", help="only the calls whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with torch.no_grad():
        found = sweep(call for call in all_calls() if not options.only or options.only in call.name)
    options.page.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
