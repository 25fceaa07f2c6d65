"""What rounds of JAX's ways come to: ratios against bfloat16 written by hand, and verdicts on mezzo's."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.jax_cases import BOUNDED, BUILD_BOUND, CONTROL, ERROR_BOUND, HAND, RUN_BOUND
from benchmarks.pairing import Estimate, estimate, judge
from benchmarks.table import format_estimate, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.jax_cases import JaxCase

MEBI = 2**20
NOTHING = "-"

# Seconds of each way in one round.
Seconds = dict[str, float]


@dataclass
class JaxMeasurement:
    """What the processes of a case found.

    Attributes:
        case: Whose it is.
        facts: Of each way what its program says of itself, or why there is none.
        runs: Rounds of runs, one list for each process.
        builds: Rounds of building, one list for each process; seconds of tracing, lowering and compiling.
        versions: Of the packages that were there.
    """

    case: JaxCase
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: list[list[Seconds]] = field(default_factory=list)
    builds: list[list[dict[str, list[float]]]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, found: dict[str, Any]) -> None:
        """Take what one more process found; facts are those of the first."""
        self.facts = self.facts or found.get("facts", {})
        self.runs.append(found["runs"])
        self.builds.append(found.get("builds", []))
        self.versions = found["versions"]

    def record(self) -> dict[str, Any]:
        """As JSON data, every round included."""
        case = {"name": self.case.name, "title": self.case.title}
        return {**case, "facts": self.facts, "runs": self.runs, "builds": self.builds}

    @property
    def wholes(self) -> list[list[Seconds]]:
        """Seconds from a function to a program that runs."""
        return [[{way: sum(times) for way, times in one.items()} for one in group] for group in self.builds]

    @property
    def tracings(self) -> list[list[Seconds]]:
        """Seconds of tracing alone."""
        return [[{way: times[0] for way, times in one.items()} for one in group] for group in self.builds]


def against(groups: Sequence[Sequence[Seconds]], way: str, other: str = HAND) -> Estimate:
    """A way's seconds as ratios to those of another in the same round."""
    return estimate([[one[way] / one[other] for one in group if way in one] for group in groups])


def above(groups: Sequence[Sequence[Seconds]], way: str, other: str = HAND) -> Estimate:
    """The seconds that a way takes more than another in the same round."""
    return estimate([[one[way] - one[other] for one in group if way in one] for group in groups])


def middle(groups: Sequence[Sequence[Seconds]], way: str) -> float:
    """The median of a way's seconds."""
    return median(one[way] for group in groups for one in group if way in one)


TIME_COLUMNS = (
    "way",
    "a step",
    "against by hand",
    f"bound {RUN_BOUND:g}",
    "trace, lower, compile",
    "against by hand",
    f"bound {BUILD_BOUND:g}",
    "trace",
    "above by hand",
)


def time_cells(found: JaxMeasurement, way: str) -> Iterator[str]:
    """How long a step takes, and how long until there is one to take."""
    yield format_seconds(middle(found.runs, way))
    yield from _judged(found.runs, way, RUN_BOUND)
    if not all(way in one for group in found.builds for one in group):
        yield from [NOTHING] * 5
        return
    yield format_seconds(middle(found.wholes, way))
    yield from _judged(found.wholes, way, BUILD_BOUND)
    yield format_seconds(middle(found.tracings, way))
    yield NOTHING if way == HAND else f"{above(found.tracings, way).median * 1e3:+.1f} ms"


def _judged(groups: Sequence[Sequence[Seconds]], way: str, bound: float) -> tuple[str, str]:
    if way == HAND:
        return NOTHING, NOTHING
    measured = against(groups, way)
    verdict = judge(measured, against(groups, CONTROL), "ratio", bound) if way in BOUNDED else NOTHING
    return format_estimate(measured, "ratio"), verdict


FACT_COLUMNS = (
    "way",
    "kept for backward, MiB",
    "not more than by hand",
    "temporaries, MiB",
    "error of gradients",
    "against by hand",
    "not above by hand",
    "bfloat16 products",
    "casts",
    "equations",
)


def fact_cells(found: JaxMeasurement, way: str) -> Iterator[str]:
    """What is kept, how far off the gradients are, and what the program is made of."""
    mine, by_hand = found.facts[way], found.facts[HAND]
    kept = mine["residual_bytes"]
    yield _mebibytes(kept)
    yield NOTHING if kept is None else _verdict(way, kept <= by_hand["residual_bytes"])
    yield _mebibytes(mine["temporary_bytes"])
    ratios = [one / other for one, other in zip(mine["errors"], by_hand["errors"], strict=True)]
    yield f"{median(mine['errors']):.3g}"
    yield f"{median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"
    yield _verdict(way, median(ratios) <= ERROR_BOUND)
    yield f"{mine['low_products']} of {mine['products']}"
    yield str(mine["converts"])
    yield str(mine["equations"])


def _mebibytes(number: int | None) -> str:
    return NOTHING if number is None else f"{number / MEBI:,.2f}"


def _verdict(way: str, holds: bool) -> str:
    if way not in BOUNDED:
        return NOTHING
    return "met" if holds else "not met"


CALL_COLUMNS = ("the loss", "float32", "by hand", "mezzo", "mezzo above float32", "by hand, twice (control)")


def call_rows(found: JaxMeasurement) -> Iterator[tuple[str, ...]]:
    """Jitted and not, what a call costs."""
    for title, ending in (("not jitted", ""), ("jitted", ", jitted")):
        float32, hand, mezzo, control = (f"{way}{ending}" for way in ("float32", HAND, "mezzo", CONTROL))
        yield (
            title,
            *(format_seconds(middle(found.runs, way)) for way in (float32, hand, mezzo)),
            format_estimate(above(found.runs, mezzo, float32), "difference"),
            format_estimate(above(found.runs, control, hand), "difference"),
        )
