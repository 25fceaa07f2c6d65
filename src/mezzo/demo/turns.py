"""Training several runs in turn, epoch by epoch, with a bar for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import Console


class Trainee(Protocol):
    """What can be trained for an epoch."""

    def train_epoch(self) -> float:
        """Train an epoch; give its mean training loss."""


Made = TypeVar("Made", bound=Trainee)


def train_in_turn(
    groups: Sequence[Mapping[str, Callable[[], Made]]], epochs: int, console: Console, busy: str = ""
) -> list[Made]:
    """Train all runs, one group after the other.

    Args:
        groups: Runs whose times are to be compared, by the title of their bar: what makes each. A group is made when its
            turn comes, and kept alive to the end.
        epochs: How many epochs to train each.
        console: Where the bars are.
        busy: What a bar says until its first epoch is done.

    Returns:
        The runs, trained, in their order.
    """
    finished: list[Made] = []
    with _progress(console) as progress:
        bars = {
            title: progress.add_task(title, total=epochs, note="", start=False) for group in groups for title in group
        }
        for group in groups:
            runs = {title: make() for title, make in group.items()}
            # Epoch by epoch in turn: what else the machine does then slows all runs alike.
            for epoch in range(epochs):
                for title, run in runs.items():
                    progress.start_task(bars[title])
                    if epoch == 0:
                        progress.update(bars[title], note=busy)
                    progress.update(bars[title], advance=1, note=f"loss {run.train_epoch():.4f}")
            finished.extend(runs.values())
    return finished


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
    )
