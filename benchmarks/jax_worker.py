"""The process that measures one JAX model in every way: ``python -m benchmarks.jax_worker MODEL PLAN``.

All ways take turns in this one process, on one core. Its last line of output is what it found, as JSON.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from typing import TYPE_CHECKING

from benchmarks.jax_cases import JaxPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

# What a row is named for, and the package that it comes from.
PACKAGES = {
    "jax": "jax",
    "jaxlib": "jaxlib",
    "jmp": "jmp",
    "mpx": "mixed-precision-for-jax",
    "jaxamp": "jaxamp",
    "grampax": "grampax",
}


def main(arguments: Sequence[str]) -> int:
    """Measure, then print."""
    name, plan = arguments
    _stay_on_one_core()
    from benchmarks.jax_measure import measure_calls, measure_steps
    from benchmarks.jax_models import MODELS

    measure = measure_calls if name == "call" else measure_steps
    found = measure(MODELS[name], JaxPlan(**json.loads(plan)))
    print(json.dumps({**found, "versions": versions()}))
    return 0


def _stay_on_one_core() -> None:
    """Before JAX counts the cores, and chooses its device: one thread, as on the other pages."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    os.environ["JAX_PLATFORMS"] = "cpu"


def versions() -> dict[str, str]:
    """Of what is installed here of the packages that are compared."""
    found = {}
    for name, package in PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
