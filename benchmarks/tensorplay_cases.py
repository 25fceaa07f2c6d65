"""What is measured of `mezzo.tensorplay` against TensorPlay's own autocast: data that needs no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from benchmarks.pairing import Kind

LAYER_BOUND = 1.10
# Over native autocast: for a wrapped call, and for each cast in it.
CALL_BOUND = 4e-6
CAST_BOUND = 4e-6
# 1.00, within what two processes differ by anyway.
OUTSIDE_BOUND = 1.02


@dataclass(frozen=True)
class TensorplayCase:
    """One row of the table.

    Attributes:
        name: What ``--case`` selects, by the whole name or by its first words.
        title: What the table shows.
        workload: Which kind of work, see `benchmarks.tensorplay_work`.
        subject: The layer, the call, or the way of entering.
        kind: Whether mezzo's time is divided by TensorPlay's or TensorPlay's is taken from it.
        bound: The promise, in the unit of ``kind`` (differences in seconds); None for information only.
        together: Never: what mezzo wraps it wraps for a whole process, and native autocast must not see it.
        most_rounds: As many as the plan says.
        worker: The module that plays a side.
    """

    name: str
    title: str
    workload: str
    subject: str
    kind: Kind
    bound: float | None
    together: ClassVar[bool] = False
    most_rounds: ClassVar[int | None] = None
    worker: ClassVar[str] = "benchmarks.tensorplay_worker"


_LAYERS: dict[str, tuple[str, float | None]] = {
    "256-native": ("d=256, (8, 64): against native autocast, whose norms read garbage", LAYER_BOUND),
    "256-by-hand": ("d=256, (8, 64): against native autocast with norms that cast by hand", None),
    "256-float32": ("d=256, (8, 64): against float32 without autocast", None),
    "64-native": ("d=64, (1, 32): against native autocast, whose norms read garbage", None),
}

# How many casts mezzo inserts, by call.
_CALLS = {
    "mm-low": ("mm: two in bfloat16", 0),
    "mm-leaf": ("mm: bfloat16 and a float32 weight", 1),
    "mm-activations": ("mm: two float32 activations that require a gradient", 2),
    "matmul-operator": ("x @ w: both in bfloat16", 0),
    "linear": ("linear: bfloat16, float32 weight and bias", 2),
    "prod": ("prod: bfloat16, listed as fp32", 1),
    "mse-loss": ("mse_loss: two in bfloat16, listed as fp32", 2),
    "cat": ("cat: bfloat16 and float32, promoted", 1),
    "layer-norm": ("layer_norm: bfloat16, float32 weight and bias, repaired", 1),
}
_UNLISTED = {"relu": "relu of bfloat16", "add": "add of bfloat16", "add-operator": "x + y in bfloat16"}
_OUTSIDE = {"mm": "mm", "add": "add", "relu": "relu", "linear": "a Linear layer"}
_ENTERING = {
    "new": "a new region",
    "again": "one region, entered again",
    "inside": "a new region inside an open one",
}


def _number(casts: int) -> str:
    return f"{casts or 'no'} cast{'' if casts == 1 else 's'}"


TENSORPLAY_CASES: tuple[TensorplayCase, ...] = (
    *(
        TensorplayCase(
            f"tensorplay-layer-{subject}",
            f"encoder layer, forward and backward, {title}",
            "layer",
            subject,
            "ratio",
            bound,
        )
        for subject, (title, bound) in _LAYERS.items()
    ),
    *(
        TensorplayCase(
            f"tensorplay-call-{subject}",
            f"{title}; {_number(casts)}",
            "call",
            subject,
            "difference",
            CALL_BOUND + casts * CAST_BOUND,
        )
        for subject, (title, casts) in _CALLS.items()
    ),
    *(
        TensorplayCase(
            f"tensorplay-unlisted-{subject}",
            f"{title}, in a region that leaves it alone",
            "call",
            subject,
            "ratio",
            None,
        )
        for subject, title in _UNLISTED.items()
    ),
    *(
        TensorplayCase(
            f"tensorplay-outside-{subject}",
            f"{title} in float32, outside of regions, after one has been used",
            "outside",
            subject,
            "ratio",
            OUTSIDE_BOUND,
        )
        for subject, title in _OUTSIDE.items()
    ),
    *(
        TensorplayCase(f"tensorplay-enter-{way}", f"enter and exit {title}", "enter", way, "difference", None)
        for way, title in _ENTERING.items()
    ),
)


def tensorplay_case_named(name: str) -> TensorplayCase:
    """The one case of exactly this name."""
    return next(case for case in TENSORPLAY_CASES if case.name == name)
