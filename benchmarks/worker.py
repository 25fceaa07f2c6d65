"""The process that plays one side, or all: reads one JSON request per line, answers one JSON line to each.

Requests are ``{"case": name, "side": side, "clock": clock}``, once for each side that it plays, then
``{"run": iterations, "side": side}`` any number of times, answered by ``{"seconds": s}``; the end of the input ends
the process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from benchmarks.work import Work

THREADS = 1

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


Prepare = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
"""Builds a side from a request, puts it into the state, and gives the answer."""


def main(prepare: Prepare | None = None) -> int:
    """Serve requests from standard input until it ends.

    Args:
        prepare: Builds a side; by default one of PyTorch's cases.
    """
    prepare = prepare or _prepare
    answers = _claim_output()
    state: dict[str, Any] = {}
    for line in sys.stdin:
        try:
            answer = _answer(json.loads(line), state, prepare)
        except Exception:  # noqa: BLE001 - whatever went wrong here belongs in the parent's report
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


def _claim_output() -> TextIO:
    """Keep the pipe for answers alone: what a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(request: dict[str, Any], state: dict[str, Any], prepare: Prepare) -> dict[str, Any]:
    if "case" in request:
        return prepare(request, state)
    return {"seconds": _timed(state[request["side"]], request["run"], state["clock"])}


def _prepare(request: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    import torch

    from benchmarks.cases import case_named
    from benchmarks.workloads import build

    torch.set_num_threads(THREADS)
    state["clock"] = CLOCKS[request["clock"]]
    case, side = case_named(request["case"]), request["side"]
    state[side] = build(case, side)
    probe = state[side].probe()
    if side != "mezzo" and "mezzo" in sys.modules and not (case.together or case.rival_loads_mezzo):
        message = "the PyTorch side has mezzo loaded; its timings would not be PyTorch's own."
        raise RuntimeError(message)
    return {"probe": probe, "torch": torch.__version__, "threads": torch.get_num_threads()}


def _timed(work: Work, iterations: int, clock: Callable[[], float]) -> float:
    # The collector stays on, as it is for users: objects that a side allocates are part of its cost. Only
    # what earlier rounds left behind is not.
    gc.collect()
    if work.between is not None:
        return sum(_once(work.loop, work.between, clock) for _ in range(iterations))
    start = clock()
    work.loop(iterations)
    return clock() - start


def _once(loop: Callable[[int], None], between: Callable[[], None], clock: Callable[[], float]) -> float:
    between()
    start = clock()
    loop(1)
    return clock() - start


if __name__ == "__main__":
    sys.exit(main())
