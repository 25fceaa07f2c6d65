"""What a demo is asked to do and what each run of it gives, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Precision = Literal["float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")


@dataclass(frozen=True)
class Plan:
    """How long and how to train; the same for every run of a demo.

    Raises:
        ValueError: If there is not at least one epoch of at least one sample.
    """

    epochs: int = 10
    batch_size: int = 128
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if value < 1:
                message = f"The demo got {name}={value!r}; expected a whole number of at least 1."
                raise ValueError(message)


@dataclass(frozen=True)
class RunResult:
    """The numbers of one run.

    Args:
        model: The model's name.
        precision: "float32" without autocast, "bfloat16" under it.
        parameters: Number of trainable weights.
        train_losses: Mean training loss of each epoch.
        test_losses: Loss on the test part after each epoch.
        test_accuracy: Share of the test part that is classified right after the last epoch.
        epoch_seconds: Time spent in the training steps of each epoch, without evaluation.
        peak_memory_bytes: Most memory alive at one moment of a training step.
        ops_by_dtype: Output dtype -> calls that autocast decided on, in one forward pass with its loss.
        casts: Casts that autocast inserted in that pass.
    """

    model: str
    precision: Precision
    parameters: int
    train_losses: tuple[float, ...]
    test_losses: tuple[float, ...]
    test_accuracy: float
    epoch_seconds: tuple[float, ...]
    peak_memory_bytes: int
    ops_by_dtype: Mapping[str, int]
    casts: int

    @property
    def seconds(self) -> float:
        """Time spent in training steps, all epochs together."""
        return sum(self.epoch_seconds)


def speed_up(result: RunResult, results: Iterable[RunResult]) -> float | None:
    """How many times faster a run trained than the same model in float32.

    Returns:
        The ratio, above 1 when `result` is faster, or None where `results` has no float32 run of the model.
    """
    for other in results:
        if other.model == result.model and other.precision == "float32":
            return other.seconds / result.seconds
    return None
