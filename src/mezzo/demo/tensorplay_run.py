"""One seeded training run in TensorPlay: a net, a precision and whose autocast; what it learned and how long it took."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorplay
from tensorplay.nn import functional

from mezzo.demo.results import Precision, TensorPlayResult
from mezzo.demo.tensorplay_model import build
from mezzo.tensorplay import GradScaler, autocast

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from mezzo.demo.arrays import ArrayPart
    from mezzo.demo.results import Plan


class TensorPlayWay(NamedTuple):
    """How a run trains.

    Args:
        precision: "float32" without autocast, "bfloat16" under it, "float16" under it and with a gradient scaler.
        native: Whether autocast is TensorPlay's own instead of mezzo's.
    """

    precision: Precision
    native: bool = False

    def __str__(self) -> str:
        return f"{self.precision}, native" if self.native else self.precision

    def region(self) -> AbstractContextManager[object]:
        """The autocast region to run a forward pass in."""
        if self.precision == "float32":
            return nullcontext()
        dtype = getattr(tensorplay, self.precision)
        region: Any = tensorplay.autocast if self.native else autocast
        opened: AbstractContextManager[object] = region("cpu", dtype=dtype)
        return opened


WAYS = (
    TensorPlayWay("float32"),
    TensorPlayWay("bfloat16", native=True),
    TensorPlayWay("bfloat16"),
    TensorPlayWay("float16"),
)


class TensorPlayRun:
    """Trains a net in one way, epoch by epoch, on the CPU.

    The same arguments on the same machine give the same losses; the global random state is left alone.

    Args:
        name: A key of `mezzo.demo.tensorplay_model.NORMS`.
        train: What to train on.
        test: What to evaluate on.
        way: The precision and whose autocast.
        plan: How long, how fast, and the seed.
    """

    def __init__(self, name: str, train: ArrayPart, test: ArrayPart, way: TensorPlayWay, plan: Plan) -> None:
        self.name = name
        self.way = way
        self._train, self._test = _tensors(train), _tensors(test)
        self._samples = len(train)
        self._batch_size = min(plan.batch_size, len(train))
        self._order = np.random.default_rng(plan.seed)
        self._model = build(name, plan.seed)
        self._optimizer = tensorplay.optim.AdamW(
            self._model.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay
        )
        # Float16 gradients are too small without a scale; bfloat16 has float32's range and needs none.
        self._scaler = GradScaler("cpu", enabled=way.precision == "float16", growth_interval=plan.growth_interval)
        self._train_losses: list[float] = []
        self._test_losses: list[float] = []
        self._test_accuracy = 0.0
        self._epoch_seconds: list[float] = []
        self._scales: list[float] = []
        self._skipped_steps: list[int] = []
        # What a process's first region and first step set up is in no epoch's time. It changes no weight.
        self._loss(tensorplay.arange(self._batch_size)).backward()

    def train_epoch(self) -> float:
        """Train one epoch, then evaluate, outside the measured time.

        Returns:
            The epoch's mean training loss; NaN where training has gone there.
        """
        chosen = np.array_split(self._order.permutation(self._samples), -(-self._samples // self._batch_size))
        start = time.perf_counter()
        losses = [self._step(tensorplay.from_numpy(batch)) * len(batch) for batch in chosen]
        self._epoch_seconds.append(time.perf_counter() - start)
        self._train_losses.append(sum(losses) / self._samples)
        loss, self._test_accuracy = self._evaluate()
        self._test_losses.append(loss)
        return self._train_losses[-1]

    def _step(self, chosen: Any) -> float:
        self._optimizer.zero_grad()
        loss = self._loss(chosen)
        self._scaler.scale(loss).backward()
        before = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._scaler.is_enabled():
            self._scales.append(self._scaler.get_scale())
            if self._scales[-1] < before:
                self._skipped_steps.append(len(self._scales))
        return float(loss.item())

    def _loss(self, chosen: Any) -> Any:
        images, labels = self._train
        with self.way.region():
            return functional.cross_entropy(self._model(images[chosen]), labels[chosen])

    def _evaluate(self) -> tuple[float, float]:
        images, labels = self._test
        with tensorplay.no_grad(), self.way.region():
            logits = self._model(images)
            loss = functional.cross_entropy(logits, labels).item()
        right = (logits.argmax(-1) == labels).to(tensorplay.float32)
        return float(loss), float(right.mean().item())

    def result(self) -> TensorPlayResult:
        """The numbers of the epochs so far; training may go on afterwards."""
        return TensorPlayResult(
            model=self.name,
            precision=self.way.precision,
            native=self.way.native,
            parameters=sum(weight.numel() for weight in self._model.parameters()),
            train_losses=tuple(self._train_losses),
            test_losses=tuple(self._test_losses),
            test_accuracy=self._test_accuracy,
            epoch_seconds=tuple(self._epoch_seconds),
            scales=tuple(self._scales),
            skipped_steps=tuple(self._skipped_steps),
        )


def _tensors(part: ArrayPart) -> tuple[Any, Any]:
    """Give images, float32, (samples, 64), and labels, int64, (samples,)."""
    return tensorplay.from_numpy(part.images.reshape(len(part), -1)), tensorplay.from_numpy(part.labels)
