"""Tensors that leave a region, and a float32 stretch inside of one, with the casts that the page shows.

Run it with ``python examples/tensorplay_nested.py``; it takes a second. On CUDA the low dtype is float16.
"""

from __future__ import annotations

import tensorplay

from mezzo.tensorplay import autocast

DEVICE = "cuda" if tensorplay.cuda.is_available() else "cpu"


def main() -> None:
    """Multiply in and out of regions."""
    if DEVICE == "cpu":
        print("CUDA is not there, so the low dtype is the CPU's")
    tensorplay.manual_seed(0)
    # Creates some tensors in default dtype (here assumed to be float32)
    a, b, c, d = (tensorplay.rand(8, 8, device=DEVICE) for _ in range(4))

    with autocast(device_type=DEVICE):
        # mm is on autocast's list of ops that should run in lower precision.
        # Inputs are float32, but the op runs in lower precision and its output is low. No manual casts are required.
        e = a.mm(b)
        # Also handles mixed input types
        f = d.mm(e)
    # After exiting autocast, calls f.float() to use with d
    g = d.mm(f.float())
    print(f"in: {e.dtype} {f.dtype}; after, with a cast by hand: {g.dtype}")

    with autocast(device_type=DEVICE):
        e = a.mm(b)
        with autocast(device_type=DEVICE, enabled=False):
            # Calls e.float() to ensure float32 execution (necessary because e was created in an autocasted region)
            f = c.mm(e.float())
        # No manual casts are required when re-entering the autocast-enabled region.
        # mm again runs in lower precision and produces low output, regardless of input types.
        g = d.mm(f)
    print(f"in: {e.dtype}; nested, disabled: {f.dtype}; in again: {g.dtype}")

    # A subregion of TensorPlay's own, as a library may have it, is obeyed too.
    with autocast(device_type=DEVICE):
        with tensorplay.autocast(device_type=DEVICE, enabled=False):
            f = a.mm(b)
        print(f"nested, disabled by tensorplay.autocast: {f.dtype}; in again: {a.mm(b).dtype}")

    # Or let mezzo cast: a policy under which every listed op runs in float32.
    with autocast(device_type=DEVICE):
        e = a.mm(b)
        with autocast(device_type=DEVICE, policy="fp32"):
            f = c.mm(e)
        print(f"nested, policy fp32, without a cast by hand: {f.dtype}; in again: {d.mm(f).dtype}")


if __name__ == "__main__":
    main()
