"""What calls give under the package's own autocast, in a process for each dtype: its cache mixes them up in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import tensorplay

from tests.tensorplay.op_runs import dtype_names, run

__all__ = ["native_dtypes"]


@cache
def native_dtypes(half: str, inputs: str) -> dict[str, list[str]]:
    """Run every sample call of the CPU's table in a region of the package's own.

    Args:
        half: The region's dtype, by name.
        inputs: The dtype of the float inputs, by name.

    Returns:
        Op to the dtypes of its floating and complex results; ops that raise are left out.
    """
    command = [sys.executable, "-m", "tests.tensorplay.op_native", half, inputs]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def main(half: str, inputs: str) -> None:
    """Print them.

    Args:
        half: As above.
        inputs: As above.
    """
    from mezzo.builtin import builtin_policy

    found = {}
    for op in builtin_policy("cpu", framework="tensorplay").ops:
        try:
            region = tensorplay.autocast("cpu", dtype=getattr(tensorplay, half))
            found[op] = dtype_names(run(op, [getattr(tensorplay, inputs)], region))
        except (RuntimeError, TypeError, NotImplementedError):
            continue
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
