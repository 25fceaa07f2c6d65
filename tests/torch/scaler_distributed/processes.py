"""A small launcher: the same functions in several real processes, joined by gloo.

Test modules list functions of the rank in ``CHECKS``. `run` starts the processes once, which call all of them, each in a
process group of its own, so that a failure in one does not put the next out of step. What they return is compared by the
tests, in the process of pytest.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = timedelta(seconds=30)
"""How long a rank waits in a collective for another that has failed."""


class Ranks:
    """What the functions returned, by name, in order of the ranks."""

    def __init__(self, outcomes: dict[str, list[tuple[Any, str | None]]], said: str) -> None:
        self._outcomes = outcomes
        self._said = said

    def __getitem__(self, check: str) -> list[Any]:
        """The results of all ranks; if one of them failed, so does the test that asks."""
        outcomes = self._outcomes[check]
        failed = [text for _, text in outcomes if text is not None]
        if failed:
            pytest.fail(f"{check} failed on {len(failed)} rank(s)\n" + "\n".join([*failed, self._said]))
        return [result for result, _ in outcomes]


def run(*modules: str, world: int = 2, seconds: float = 240) -> Ranks:
    """Call the functions in ``CHECKS`` of the modules in ``world`` processes, and kill these after so many seconds."""
    checks = [check.__name__ for check in _checks(modules)]
    assert len(set(checks)) == len(checks), "two functions of one name"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        said = _wait([_start(modules, folder, rank, world) for rank in range(world)], seconds)
        outcomes = {check: [_outcome(folder / f"{check}.{rank}") for rank in range(world)] for check in checks}
    return Ranks(outcomes, said)


def _checks(modules: Sequence[str]) -> list[Callable[[int], Any]]:
    return [check for module in modules for check in importlib.import_module(module).CHECKS]


def _start(modules: Sequence[str], folder: Path, rank: int, world: int) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"}
    # PyTorch's own modules warn at each other's import; what the checks warn of is an error, see `_call`.
    command = [sys.executable, "-m", __name__, str(folder), str(rank), str(world), *modules]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _wait(processes: list[subprocess.Popen[str]], seconds: float) -> str:
    end = time.monotonic() + seconds
    try:
        said = [process.communicate(timeout=max(0.1, end - time.monotonic()))[0] for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        said = [process.communicate()[0] for process in processes]
    # A process that a signal ended has no traceback: its code is all that tells.
    return "\n".join(f"--- process {rank} ended with {p.returncode}\n{said[rank]}" for rank, p in enumerate(processes))


def _outcome(path: Path) -> tuple[Any, str | None]:
    if not path.exists():
        return None, f"{path.name} was not reached, or not finished in time"
    return torch.load(path, weights_only=False)


def _call(check: Callable[[int], Any], folder: Path, rank: int, world: int) -> None:
    store = dist.FileStore(str(folder / f"{check.__name__}.store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
    result, text = None, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.manual_seed(0)
            result = check(rank)
    except Exception:
        text = f"--- rank {rank}\n{traceback.format_exc()}"
    torch.save((result, text), folder / f"{check.__name__}.{rank}.part")
    (folder / f"{check.__name__}.{rank}.part").rename(folder / f"{check.__name__}.{rank}")
    _wait_for_others(store, rank, world)
    dist.destroy_process_group()


def _wait_for_others(store: dist.Store, rank: int, world: int) -> None:
    """Close no connection while another rank still makes its own: it would fail with "Connection closed by peer"."""
    store.set(f"ended.{rank}", "")
    with contextlib.suppress(RuntimeError):  # one did not come
        store.wait([f"ended.{other}" for other in range(world)], PATIENCE)


def main(folder: str, rank: str, world: str, *modules: str) -> None:
    """Run as a process of its own: call every check of the modules as one of the ranks."""
    torch.set_num_threads(1)
    for check in _checks(modules):
        _call(check, Path(folder), int(rank), int(world))


if __name__ == "__main__":
    main(*sys.argv[1:])
