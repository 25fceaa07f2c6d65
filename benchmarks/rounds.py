"""Taking the measurements: starts the processes of a case, and lets one of them compute at a time."""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.pairing import SIDES, Round, Side, next_iterations, turns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.cases import Case
    from benchmarks.tensorplay_cases import TensorplayCase

ROOT = Path(__file__).resolve().parent.parent
ANSWER_SECONDS = 300.0


class WorkerFailedError(RuntimeError):
    """A worker raised, died, did not answer, or did other work than its neighbours."""

    def __init__(self, side: Side, what: str) -> None:
        super().__init__(f"the worker for side {side!r} {what}")


@dataclass(frozen=True)
class Plan:
    """How much to measure.

    Attributes:
        process_sets: How often fresh processes are started; memory layout differs from process to process.
        rounds: Measured rounds in each set, where the work is short.
        least_rounds: Measured rounds in each set, however long the work takes.
        budget: Seconds that the rounds of a set may take, beyond the least.
        warmup: Rounds before them that are thrown away.
        seconds: What one side's turn should take, at least one iteration. Short turns: neighbours in time
            are alike, and a median over many pairs shrugs off the few that something disturbed.
        clock: "wall", or "cpu" for the processor time of the process alone (busy machines).
    """

    process_sets: int = 3
    rounds: int = 40
    least_rounds: int = 12
    budget: float = 8.0
    warmup: int = 2
    seconds: float = 0.05
    clock: str = "wall"

    def rounds_for(self, turn: float, most: int | None = None) -> int:
        """How many rounds to measure when one side's turn takes ``turn`` seconds; never more than ``most``."""
        affordable = int(self.budget / (len(SIDES) * turn))
        rounds = max(self.least_rounds, min(self.rounds, affordable))
        return rounds if most is None else min(rounds, most)


QUICK = Plan(process_sets=1, rounds=5, least_rounds=3, budget=0.5, warmup=1, seconds=0.02)


@dataclass
class Measurement:
    """The rounds of a case, one list for each set of processes, and what they were measured on."""

    groups: list[list[Round]] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)
    torch: str = ""
    threads: int = 0


class Worker:
    """A running worker process, as its parent sees it."""

    def __init__(self, side: Side, module: str = "benchmarks.worker") -> None:
        limits = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.side = side
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            env={**os.environ, **limits},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, request: dict[str, Any]) -> None:
        """Send a request without waiting for the answer."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError as error:
                raise WorkerFailedError(self.side, "ended before it was asked") from error

    def hear(self) -> dict[str, Any]:
        """Wait for the answer to the last request."""
        output = self._process.stdout
        if output is None or not select.select([output], [], [], ANSWER_SECONDS)[0]:
            raise WorkerFailedError(self.side, f"gave no answer within {ANSWER_SECONDS:.0f} s")
        line = output.readline()
        if not line:
            raise WorkerFailedError(self.side, "ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerFailedError(self.side, f"raised\n{answer['error']}")
        return answer

    def run(self, iterations: int, side: Side | None = None) -> float:
        """Seconds that ``iterations`` iterations took; of which side, where the process plays several."""
        self.tell({"run": iterations, "side": side or self.side})
        return float(self.hear()["seconds"])

    def close(self) -> None:
        """End the process; by force where it is stuck."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def measure(case: Case | TensorplayCase, plan: Plan) -> Measurement:
    """Measure one case in fresh processes, ``plan.process_sets`` times over."""
    result = Measurement()
    for _ in range(plan.process_sets):
        with _workers(case.worker, together=case.together) as workers:
            _prepare(workers, case, plan, result)
            iterations, turn = _calibrate(workers["torch"], plan.seconds)
            count = plan.warmup + plan.rounds_for(turn, case.most_rounds)
            rounds = [_round(workers, index, iterations) for index in range(count)]
        result.iterations.append(iterations)
        result.groups.append(rounds[plan.warmup :])
    return result


@contextmanager
def _workers(module: str, *, together: bool) -> Iterator[dict[Side, Worker]]:
    """Start a process for each side, or one that plays them all."""
    with ExitStack() as stack:
        workers: dict[Side, Worker] = {}
        for side in SIDES:
            if not together or not workers:
                workers[side] = Worker(side, module)
                stack.callback(workers[side].close)
            else:
                workers[side] = workers[SIDES[0]]
        yield workers


def _prepare(workers: dict[Side, Worker], case: Case | TensorplayCase, plan: Plan, result: Measurement) -> None:
    """Let all sides build, at once where they can, and make sure that they will do the same work."""
    answers = {}
    for side, worker in workers.items():
        worker.tell({"case": case.name, "side": side, "clock": plan.clock})
        if case.together:
            answers[side] = worker.hear()
    if not case.together:
        answers = {side: worker.hear() for side, worker in workers.items()}
    dtype, value = answers["torch"]["probe"]
    for side, answer in answers.items():
        other_dtype, other_value = answer["probe"]
        # Kernels may round differently; a different dtype or a different computation is not a rounding.
        if other_dtype != dtype or not math.isclose(other_value, value, rel_tol=1e-2, abs_tol=1e-6):
            what = f"computes {answer['probe']} where PyTorch computes {[dtype, value]}"
            raise WorkerFailedError(side, what)
    result.torch, result.threads = answers["torch"]["torch"], answers["torch"]["threads"]


def _calibrate(worker: Worker, target: float) -> tuple[int, float]:
    """How many iterations make a turn of about ``target`` seconds, and what that turn will take."""
    iterations = 1
    worker.run(iterations, "torch")
    while (seconds := worker.run(iterations, "torch")) < 0.5 * target:
        iterations = max(iterations + 1, next_iterations(seconds, iterations, target))
    chosen = next_iterations(seconds, iterations, target)
    return chosen, seconds / iterations * chosen


def _round(workers: dict[Side, Worker], index: int, iterations: int) -> Round:
    seconds = {side: workers[side].run(iterations, side) / iterations for side in turns(index)}
    return Round(seconds["mezzo"], seconds["torch"], seconds["control"])
