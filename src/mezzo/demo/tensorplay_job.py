"""TensorPlay's part of the demo: two nets in float32, under its own autocast, and under mezzo's."""

from __future__ import annotations

import platform
import warnings
from functools import partial
from typing import TYPE_CHECKING

import tensorplay

from mezzo.demo.parts import Finished
from mezzo.demo.tensorplay_model import NORMS
from mezzo.demo.tensorplay_report import tensorplay_table
from mezzo.demo.tensorplay_run import WAYS, TensorPlayRun
from mezzo.demo.turns import train_in_turn

if TYPE_CHECKING:
    from rich.console import Console

    from mezzo.demo.arrays import ArrayPart
    from mezzo.demo.results import Plan


class TensorPlayPart:
    """The runs of TensorPlay, on the CPU.

    Args:
        device: None or "cpu".
        strict: Whether another device is refused. If not, the name is another framework's, and no matter here.

    Raises:
        ValueError: If another device is asked for.
    """

    def __init__(self, device: str | None, *, strict: bool) -> None:
        if strict and device not in {None, "cpu"}:
            message = f"The demo trains with TensorPlay on the CPU, got {device!r}; use 'cpu' or leave the device out."
            raise ValueError(message)

    def train(self, plan: Plan, digits: tuple[ArrayPart, ArrayPart], console: Console) -> Finished:
        """Train every run, on one thread if TensorPlay has not begun to work with more; that stays so."""
        threads = _one_thread()
        where = f"{platform.machine()} CPU, {threads} thread{'' if threads == 1 else 's'}"
        console.print(
            f"TensorPlay: {len(digits[0])} digits to train on, {len(digits[1])} to test; "
            f"{plan.epochs} epochs per run, on {where}"
        )
        groups = [
            {f"{name}, {way}": partial(TensorPlayRun, name, *digits, way, plan) for way in WAYS} for name in NORMS
        ]
        results = [run.result() for run in train_in_turn(groups, plan.epochs, console)]
        setting = {"tensorplay": tensorplay.__version__, "tensorplay_threads": threads}
        return Finished(results, plan, setting, tables=(tensorplay_table(results, where),))


def _one_thread() -> int:
    """Ask for one thread and give the number there is.

    With two threads on cores that are shared, an epoch took forty times as long, measured. TensorPlay's number can be
    set once in a process, before its first work: it cannot be put back, and later it answers with a warning.
    """
    if tensorplay.get_num_threads() != 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensorplay.set_num_threads(1)
    return int(tensorplay.get_num_threads())
