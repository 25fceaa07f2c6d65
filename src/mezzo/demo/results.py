"""What a demo is asked to do and what each run of it gives, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Precision = Literal["float32", "bfloat16", "float16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Plan:
    """How long and how to train; the same for every run of a demo.

    Args:
        epochs: How often each training sample is used.
        batch_size: Samples of one step.
        learning_rate: The highest of the schedule.
        weight_decay: AdamW's.
        seed: Decides the split, the initial weights and the order of the samples.
        growth_interval: Steps without an overflow after which the gradient scaler doubles its scale.
        emulate_float16: Compute float16's products in float32 and round them, as GPUs do: for processors
            whose own float16 is slow.

    Raises:
        ValueError: If the epochs, the batch size or the growth interval are below 1.
    """

    epochs: int = 10
    batch_size: int = 128
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    seed: int = 0
    # PyTorch's 2000 is for runs of many thousand steps: in the demo's 110 the scale would never move. With 8 it
    # climbs until gradients overflow, falls back and climbs again, and skips about 5 steps: enough to see, too few
    # to fall behind the other precisions.
    growth_interval: int = 8
    emulate_float16: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "growth_interval"):
            value = getattr(self, name)
            if value < 1:
                message = f"The demo got {name}={value!r}; expected a whole number of at least 1."
                raise ValueError(message)


@dataclass(frozen=True)
class RunResult:
    """The numbers of one run.

    Args:
        model: The model's name.
        precision: "float32" without autocast, "bfloat16" under it, "float16" under it and with a gradient scaler.
        parameters: Number of trainable weights.
        train_losses: Mean training loss of each epoch.
        test_losses: Loss on the test part after each epoch.
        test_accuracy: Share of the test part that is classified right after the last epoch.
        epoch_seconds: Time spent in the training steps of each epoch, without evaluation.
        peak_memory_bytes: Most memory alive at one moment of a training step.
        ops_by_dtype: Output dtype -> calls that autocast decided on, in one forward pass with its loss.
        casts: Casts that autocast inserted in that pass.
        scales: The gradient scale after each step; empty where no scaler is used.
        skipped_steps: Numbers, from 1, of the steps that the scaler skipped, for a gradient was not finite.
        emulated: Whether float16's products were computed in float32 and rounded.
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
    scales: tuple[float, ...] = ()
    skipped_steps: tuple[int, ...] = ()
    emulated: bool = False

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
