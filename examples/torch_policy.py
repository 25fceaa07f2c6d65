"""Write a policy, save it as TOML, use it, and ask why an op runs in the dtype it does.

Run it with ``python examples/torch_policy.py``; it takes a second.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import mezzo
from mezzo.torch import autocast

BY_HAND = """\
name = "careful"
base = "unified"

[ops]
matmul = { bfloat16 = "lower_precision_fp", float16 = "fp32" }
layer_norm = "fallthrough"
"""


def main() -> None:
    """Go through the life of a policy."""
    # "unified" has one table for all devices. Here: products stay low in bfloat16, but not in float16, whose range
    # ends at 65504; and layer_norm keeps the dtype that comes in.
    careful = mezzo.builtin_policy("unified").override(
        {
            "matmul": {"bfloat16": "lower_precision_fp", "float16": "fp32"},
            "layer_norm": "fallthrough",
        },
        name="careful",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "careful.toml")
        careful.save(path)
        print(f"saved, {len(careful.ops)} rules; read back equal: {mezzo.Policy.load(path) == careful}")
        # A file need not list everything: it can start from another policy, as this one, written by hand, does.
        path.write_text(BY_HAND, encoding="utf-8")
        print(f"written by hand, equal too: {mezzo.Policy.load(path) == careful}\n")

        x = torch.full((4, 4), 300.0)
        for dtype in (torch.bfloat16, torch.float16):
            with autocast("cpu", dtype=dtype, policy=path):
                product = x @ x
                softmax = product.softmax(-1)
            largest = f"{product.dtype} with largest value {product.max():.0f}"
            print(f"in {dtype}: x @ x is {largest}, softmax {softmax.dtype}")
    with autocast("cpu", dtype=torch.float16, policy="unified"):
        print(f"under 'unified' in float16 the largest value is {(x @ x).max():.0f}\n")

    print(careful.explain("matmul"))
    print()
    print("what differs from 'unified':")
    for op, (mine, theirs) in careful.diff(mezzo.builtin_policy("unified")).items():
        print(f"  {op}: {theirs} -> {mine}")


if __name__ == "__main__":
    main()
