"""What a framework's part of the demo is asked for, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

    from mezzo.demo.arrays import ArrayPart
    from mezzo.demo.results import Plan, Trained


@dataclass(frozen=True)
class Finished:
    """A part that is done.

    Args:
        results: Its runs; of the same model float32 first.
        plan: What they were asked to do, in the end.
        setting: What is needed to judge or repeat them, for the JSON file: versions, the device, its threads.
        tables: What to show.
    """

    results: Sequence[Trained]
    plan: Plan
    setting: Mapping[str, Any]
    tables: Sequence[Table] = field(default=())


class Part(Protocol):
    """The runs of one framework, on a device that is there."""

    def train(self, plan: Plan, digits: tuple[ArrayPart, ArrayPart], console: Console) -> Finished:
        """Train every run on the first part of the digits, test it on the second; show progress on the console."""
