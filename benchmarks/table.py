"""What the reader sees: rows, on the terminal and as Markdown, and the machine they were measured on."""

from __future__ import annotations

import datetime
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.pairing import Estimate, Kind, Verdict, compare, estimate, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.cases import Case
    from benchmarks.rounds import Measurement, Plan
    from benchmarks.tensorplay_cases import TensorplayCase


@dataclass(frozen=True)
class Page:
    """A table of its own, and the file that it goes to.

    Attributes:
        stem: The file's name without its ending.
        title: The heading.
        notes: How it was measured, in lines of Markdown.
        sides: Whose time is the first column's, and whose the second's.
    """

    stem: str
    title: str
    notes: tuple[str, ...]
    sides: tuple[str, str] = ("mezzo", "torch")

    @property
    def columns(self) -> tuple[str, ...]:
        """The heads of the columns."""
        return ("case", *self.sides, "ratio or difference", "control", "bound", "verdict")


AUTOCAST = Page(
    "autocast-cpu",
    "mezzo against torch.autocast",
    (
        "Medians over paired rounds, with 95% bootstrap intervals. Each side runs in a process of its own",
        "and only one computes at a time; the control is a second PyTorch process held against the first.",
    ),
)
SCALER = Page(
    "scaler-cpu",
    "mezzo.torch.GradScaler against torch.amp.GradScaler",
    (
        "Medians over paired rounds, with 95% bootstrap intervals. All sides take turns in one process, on the",
        "same parameters and gradients; the control is a second scaler of PyTorch's held against the first.",
        "Before each iteration, outside of the timed part, every gradient is filled with 1.5 times the scale, which",
        "never moves. The optimizer's own work is part of what is timed.",
    ),
)


ACCELERATOR = Page(
    "accelerator-cpu",
    "torch.autocast on the CPU beside a registered accelerator",
    (
        "Medians over paired rounds, with 95% bootstrap intervals. All sides run PyTorch's own autocast on the CPU, each",
        'in a process of its own, and only one computes at a time; in that under "mezzo" `register_accelerator` has been',
        "called before. The control is a second process without it held against the first.",
    ),
)
PREPARE = Page(
    "prepare-cpu",
    "mezzo.torch.prepare against torch.autocast",
    (
        "Medians over paired rounds, with 95% bootstrap intervals. Each side runs in a process of its own and only one",
        "computes at a time; the control is a second PyTorch process held against the first. mezzo's side is a prepared",
        "bfloat16 model in `mezzo.torch.autocast`. Inference is under `torch.inference_mode`, each pass in a region of its",
        "own. A training step is a forward pass in the region, backward, the optimizer's step and zero_grad, on every side",
        "with `torch.optim.AdamW(fused=True)`. Bounds below 1 are promised speeds: 0.588 is 1.7 times as fast, 0.714 1.4",
        "times, 0.833 1.2 times, 0.962 1.04 times. Those with compiled=True, 1.3 and 1.08 times, are aims.",
    ),
)
APEX = Page(
    "apex-cpu",
    "mezzo.apex.amp against mezzo.torch",
    (
        "Medians over paired rounds, with 95% bootstrap intervals. Each side runs in a process of its own and only one",
        "computes at a time; the control is a second process of plain mezzo held against the first. Timed are whole",
        "training steps: forward, backward, the optimizer's step and zero_grad, with the same optimizer, dynamic scale and",
        'rule for it on both sides. "front" is `amp.initialize` and `with amp.scale_loss`. Against O1, plain mezzo is',
        '`mezzo.torch.autocast(policy="apex-o1")` around each forward pass and loss, and `mezzo.torch.GradScaler`; against',
        'O2, `mezzo.torch.prepare(low="**", keep=batch norms, buffers=True)`, inputs and outputs cast by hand, and',
        "`GradScaler`; against O0, PyTorch in float32. O1 and O2 compute in bfloat16, with a dynamic scale that it does not",
        "need: in float16 CPUs without instructions for it are so slow that no cost of the front could be seen.",
        "",
        "`scale_loss` unscales at the end of each block. Plain mezzo does it in `unscale_`, or in `step` where `unscale_`",
        "is left out. With four blocks a step that each unscale, the front makes seven passes over the gradients where",
        "plain mezzo makes one, as Apex did: that row has no bound. `delay_unscale` leaves one.",
    ),
    ("front", "plain mezzo"),
)
WATCHED = Page(
    "watched-cpu",
    "What it costs to watch: mezzo.torch with explain, find_nonfinite and others, and without",
    (
        "Medians over paired rounds, with 95% bootstrap intervals. Both sides are mezzo; the control is a second side",
        "without, held against the first. All sides take turns in one process, on the same tensors, but in the last row:",
        "there each side has a process of its own, and only one computes at a time.",
        "",
        "A training step of the encoder is zero_grad, the forward pass in `mezzo.torch.autocast` with bfloat16, and",
        "backward. The blocks of `explain` and `find_nonfinite` hold the forward pass and backward, and are given the model",
        'for its names. "recording" is what is timed of `explain`: its report is made when it is asked for, and is not in',
        "these times. To record an op takes about the same however much it computes, so the ratio is largest for small",
        "inputs. `find_nonfinite` reads every result once more, the gradients of weights too, which are as large for small",
        "inputs. `numerics` measures every result, and `shadow` computes all in float32 as well: as measured, no bound.",
        "",
        "In the rows of scalers nothing overflows, gradients are filled anew before each iteration outside of the timed",
        "part, and the optimizer's own work is timed too. Rows of `ScaleHistory` are not read in the timed part.",
    ),
    ("with", "without"),
)
PAGES = (AUTOCAST, SCALER, ACCELERATOR, PREPARE, APEX, WATCHED)


def page_of(case: Case | TensorplayCase) -> Page:
    """The page that a case is a row of."""
    own = {"scaler": SCALER, "beside": ACCELERATOR, "prepare": PREPARE, "apex": APEX, "watched": WATCHED}
    return own.get(case.workload, AUTOCAST)


_STYLES: dict[Verdict, str] = {
    "met": "green",
    "not met": "bold red",
    "control wider than the bound": "yellow",
    "no bound": "dim",
}


@dataclass(frozen=True)
class Row:
    """A measured case: medians in seconds, the comparison with its interval, the control with its own."""

    case: Case | TensorplayCase
    mezzo: float
    torch: float
    measured: Estimate
    control: Estimate
    verdict: Verdict
    measurement: Measurement

    def cells(self) -> tuple[str, ...]:
        """The row as text, one string a column."""
        kind = self.case.kind
        return (
            f"{self.case.name}: {self.case.title}",
            format_seconds(self.mezzo),
            format_seconds(self.torch),
            format_estimate(self.measured, kind),
            format_estimate(self.control, kind),
            format_bound(self.case.bound, kind),
            self.verdict,
        )

    def record(self) -> dict[str, Any]:
        """The row as JSON data, every round included."""
        return {
            **asdict(self.case),
            "mezzo_seconds": self.mezzo,
            "torch_seconds": self.torch,
            "measured": asdict(self.measured),
            "control": asdict(self.control),
            "verdict": self.verdict,
            "iterations": self.measurement.iterations,
            "rounds": [[list(one) for one in group] for group in self.measurement.groups],
        }


def to_row(case: Case | TensorplayCase, measurement: Measurement) -> Row:
    """Summarize the rounds of a case and judge them."""
    groups = measurement.groups
    measured = estimate([compare(group, case.kind, "mezzo") for group in groups])
    control = estimate([compare(group, case.kind, "control") for group in groups])
    return Row(
        case,
        median(one.mezzo for group in groups for one in group),
        median(one.torch for group in groups for one in group),
        measured,
        control,
        judge(measured, control, case.kind, case.bound),
        measurement,
    )


def describe_machine(rows: Sequence[Row], plan: Plan) -> dict[str, Any]:
    """What the numbers depend on."""
    first = rows[0].measurement if rows else None
    return {
        **describe_processor(first.torch if first else "", first.threads if first else 0),
        "clock": plan.clock,
        "rounds": f"{plan.process_sets} process sets x {plan.least_rounds} to {plan.rounds}",
        "date": today(),
    }


def describe_processor(torch: str, threads: int) -> dict[str, Any]:
    """What every measurement depends on."""
    return {
        "processor": processor_name(),
        "torch": torch,
        "python": platform.python_version(),
        "threads": threads,
    }


def today() -> str:
    """The date of a measurement."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model name, as Linux tells it; elsewhere as Python does."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def format_seconds(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def format_estimate(value: Estimate, kind: Kind) -> str:
    """A median with its interval; differences in microseconds."""
    if kind == "ratio":
        return f"{value.median:.3f} [{value.low:.3f}, {value.high:.3f}]"
    return f"{value.median * 1e6:+.2f} us [{value.low * 1e6:+.2f}, {value.high * 1e6:+.2f}]"


def format_bound(bound: float | None, kind: Kind) -> str:
    """The promise, or a dash where there is none."""
    if bound is None:
        return "-"
    return f"{bound:g}" if kind == "ratio" else f"{bound * 1e6:g} us"


def rich_table(rows: Sequence[Row], machine: dict[str, Any], page: Page) -> Table:
    """The rows for a terminal."""
    table = Table(title=page.title, caption=_caption(machine), show_lines=False)
    for column in page.columns:
        table.add_column(column, no_wrap=column != "case", justify="left" if column == "case" else "right")
    for row in rows:
        *cells, verdict = row.cells()
        table.add_row(*cells, f"[{_STYLES[row.verdict]}]{verdict}[/]")
    return table


def markdown(rows: Sequence[Row], machine: dict[str, Any], page: Page) -> str:
    """The rows as a Markdown page."""
    lines = [
        f"# {page.title}",
        "",
        _caption(machine) + ".",
        "",
        *page.notes,
        "",
        "| " + " | ".join(page.columns) + " |",
        "|" + " --- |" * len(page.columns),
    ]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _caption(machine: dict[str, Any]) -> str:
    return "; ".join(f"{name} {value}" for name, value in machine.items())
