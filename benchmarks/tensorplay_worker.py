"""The process that plays one side of a TensorPlay case, as `benchmarks.worker` does of the others."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.tensorplay_cases import tensorplay_case_named
from benchmarks.worker import CLOCKS, THREADS, main


def prepare(request: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Build the side that is asked for, and say what it computes."""
    import tensorplay

    from benchmarks.tensorplay_work import build

    tensorplay.set_num_threads(THREADS)
    state["clock"] = CLOCKS[request["clock"]]
    case, side = tensorplay_case_named(request["case"]), request["side"]
    state[side] = build(case, side)
    probe = state[side].probe()
    if side != "mezzo" and "mezzo" in sys.modules:
        message = "the side of native autocast has mezzo loaded; its timings would not be TensorPlay's own."
        raise RuntimeError(message)
    return {"probe": probe, "torch": tensorplay.__version__, "threads": tensorplay.get_num_threads()}


if __name__ == "__main__":
    sys.exit(main(prepare))
