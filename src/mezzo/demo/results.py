"""What a demo is asked to do and what each run of it gives, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Framework = Literal["torch", "jax", "tensorplay"]
Precision = Literal["float32", "bfloat16", "float16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float16")
LOW_WEIGHTS: tuple[Precision, ...] = ("bfloat16", "float16")


@dataclass(frozen=True)
class Way:
    """How a run trains.

    Args:
        precision: "float32" without autocast, "bfloat16" under it, "float16" under it and with a gradient scaler.
        prepared: Whether weights are stored in that precision, with float32 masters in the optimizer.
    """

    precision: Precision
    prepared: bool = False

    def __str__(self) -> str:
        return f"{self.precision}*" if self.prepared else self.precision


def ways(model: str) -> tuple[Way, ...]:
    """The runs of a model: every precision, and prepared ones beside it for the transformer.

    The conv net has 220,000 weights but activations of some millions of numbers: what casts of weights cost there
    cannot be seen.
    """
    plain = tuple(Way(precision) for precision in PRECISIONS)
    return (*plain, *(Way(precision, prepared=True) for precision in LOW_WEIGHTS)) if model == "transformer" else plain


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
            whose own float16 is slow. For PyTorch's runs.

    Raises:
        ValueError: If the epochs, the batch size or the growth interval are below 1.
    """

    # Of a length that all of PyTorch's runs together, eight, take about a minute on one core.
    epochs: int = 8
    batch_size: int = 128
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    seed: int = 0
    # PyTorch's 2000 is for runs of many thousand steps: in the demo's 88 the scale would never move. With 8 it
    # climbs until gradients overflow, falls back and climbs again, and skips about 4 steps: enough to see, too few
    # to fall behind the other precisions.
    growth_interval: int = 8
    emulate_float16: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "growth_interval"):
            value = getattr(self, name)
            if value < 1:
                message = f"The demo got {name}={value!r}; expected a whole number of at least 1."
                raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The numbers of one run that every framework gives.

    Args:
        model: The model's name.
        precision: "float32" without autocast, "bfloat16" under it, "float16" under it and with a gradient scaler.
        parameters: Number of trainable weights.
        train_losses: Mean training loss of each epoch.
        test_losses: Loss on the test part after each epoch.
        test_accuracy: Share of the test part that is classified right after the last epoch.
        epoch_seconds: Time spent in the training steps of each epoch, without evaluation.
        scales: The gradient scale after each step; empty where no scaler is used.
        skipped_steps: Numbers, from 1, of the steps that the scaler skipped, for a gradient was not finite.
    """

    framework: ClassVar[Framework]

    model: str
    precision: Precision
    parameters: int
    train_losses: tuple[float, ...]
    test_losses: tuple[float, ...]
    test_accuracy: float
    epoch_seconds: tuple[float, ...]
    scales: tuple[float, ...] = ()
    skipped_steps: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """The model's name, different from those of other frameworks."""
        return self.model

    @property
    def seconds(self) -> float:
        """Time spent in training steps, all epochs together."""
        return sum(self.epoch_seconds)


@dataclass(frozen=True, kw_only=True)
class RunResult(Trained):
    """The numbers of one run of PyTorch's: those of `Trained`, and these.

    Args:
        peak_memory_bytes: Most memory alive at one moment of a training step.
        ops_by_dtype: Output dtype -> calls that autocast decided on, in one forward pass with its loss.
        casts: Casts that autocast inserted in that pass.
        emulated: Whether float16's products were computed in float32 and rounded.
        prepared: Whether weights were stored in the low precision, with float32 masters in the optimizer.
        held_bytes: What lives from step to step, in bytes: "weights", "gradients" (as a step leaves them), "state" of
            the optimizer, "masters".
    """

    framework: ClassVar[Framework] = "torch"

    peak_memory_bytes: int
    ops_by_dtype: Mapping[str, int]
    casts: int
    emulated: bool = False
    prepared: bool = False
    held_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def way(self) -> Way:
        """How it trained."""
        return Way(self.precision, self.prepared)


@dataclass(frozen=True, kw_only=True)
class JaxResult(Trained):
    """The numbers of one run of JAX's: those of `Trained`, and these.

    Args:
        compile_seconds: Time to trace and compile the training step and the evaluation, which `epoch_seconds` is without.
        kept_bytes: What a step's forward pass keeps for the backward pass, weights included.
        dots_by_dtype: Dtype of the operands -> matrix products and convolutions, in one forward pass with its loss.
        casts: Casts that autocast put into that pass.
    """

    framework: ClassVar[Framework] = "jax"

    compile_seconds: float
    kept_bytes: int
    dots_by_dtype: Mapping[str, int]
    casts: int

    @property
    def title(self) -> str:
        """The model's name with JAX's."""
        return f"{self.model}, JAX"


@dataclass(frozen=True, kw_only=True)
class TensorPlayResult(Trained):
    """The numbers of one run of TensorPlay's: those of `Trained`, and this.

    Args:
        native: Whether autocast was TensorPlay's own instead of mezzo's. Losses are NaN where training went there.
    """

    framework: ClassVar[Framework] = "tensorplay"

    native: bool = False

    @property
    def autocast(self) -> str:
        """Whose autocast it was: "native", "mezzo", or nothing for float32."""
        return "" if self.precision == "float32" else "native" if self.native else "mezzo"

    @property
    def title(self) -> str:
        """The model's name with TensorPlay's."""
        return f"{self.model}, TensorPlay"


def speed_up(result: Trained, results: Iterable[Trained]) -> float | None:
    """How many times faster a run trained than the same model in float32, in the same framework.

    Returns:
        The ratio, above 1 when `result` is faster, or None where `results` has no float32 run of the model.
    """
    for other in results:
        if other.title == result.title and other.precision == "float32":
            return other.seconds / result.seconds
    return None
