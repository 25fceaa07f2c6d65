"""One seeded training run: a model, a precision and a way of storing weights, a device; what it learned and what it cost."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from mezzo.demo.devices import clock
from mezzo.demo.emulation import emulated_products
from mezzo.demo.memory import step_peak_bytes
from mezzo.demo.models import build
from mezzo.demo.results import RunResult
from mezzo.torch import GradScaler, SteppedScheduler, autocast, master_params, observe, prepare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mezzo.demo.data import Digits, Split
    from mezzo.demo.results import Plan, Precision, Way


def region(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The autocast region of a precision; float32 needs none."""
    if precision == "float32":
        return nullcontext()
    return autocast(device.type, dtype=getattr(torch, precision))


class TrainingStep:
    """A model, its optimizer, a gradient scaler and a batch: calling it makes one step."""

    def __init__(self, model: nn.Module, way: Way, batch: Split, plan: Plan) -> None:
        self.model = model
        self.precision = way.precision
        self.batch = batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay)
        if way.prepared:
            prepare(model, self.optimizer, dtype=getattr(torch, way.precision))
        # Float16 gradients are too small without a scale; bfloat16 has float32's range and needs none.
        self.scaler = GradScaler(
            batch.device.type, enabled=way.precision == "float16", growth_interval=plan.growth_interval
        )

    def __call__(self) -> torch.Tensor:
        """Forward and loss in the precision's region, backward and update outside it; returns the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def stepped(self) -> bool:
        """Whether the last call changed the weights: the scaler skips the optimizer after an overflow."""
        return self.scaler.stepped(self.optimizer)

    def loss(self) -> torch.Tensor:
        """The loss of the batch, computed in the precision's region."""
        with region(self.precision, self.batch.device):
            return functional.cross_entropy(self.model(self.batch.images), self.batch.labels)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that lives between steps: the batch, weights, gradients, the optimizer's state, masters.

        Except the scaler's two numbers, which are its own: they count once a step has used them.
        """
        yield from (self.batch.images, self.batch.labels)
        yield from self.model.buffers()
        for held in self.held().values():
            yield from held

    def held(self) -> dict[str, list[torch.Tensor]]:
        """What training holds from step to step, by kind; gradients as the last step left them."""
        weights = list(self.model.parameters())
        own = {id(weight) for weight in weights}
        return {
            "weights": [*weights],
            "gradients": [weight.grad for weight in weights if weight.grad is not None],
            "state": [value for state in self.optimizer.state.values() for value in state.values()],
            "masters": [held for held in master_params(self.optimizer) if id(held) not in own],
        }


class Run:
    """Trains one model in one way, epoch by epoch.

    The same arguments on the same machine give the same losses; the global random state is left alone.

    Args:
        name: A key of `mezzo.demo.models.MODELS`.
        digits: The data, on the device to train on.
        way: The precision, and whether the weights are stored in it.
        plan: How long, how fast, and the seed.
    """

    def __init__(self, name: str, digits: Digits, way: Way, plan: Plan) -> None:
        self.name = name
        self.way = way
        self._digits = digits
        self._plan = plan
        self._model = build(name, plan.seed).to(digits.train.device)
        self._step = TrainingStep(self._model, way, digits.train, plan)
        batches = -(-len(digits.train) // plan.batch_size)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._step.optimizer, max_lr=plan.learning_rate, total_steps=plan.epochs * batches
        )
        self._schedule = SteppedScheduler(schedule, self._step.scaler)
        self._order = torch.Generator().manual_seed(plan.seed)
        self._train_losses: list[float] = []
        self._test_losses: list[float] = []
        self._test_accuracy = 0.0
        self._epoch_seconds: list[float] = []
        self._scales: list[float] = []
        self._skipped_steps: list[int] = []
        # Measured first: it is also the warm-up that keeps one-off costs out of the first epoch's time.
        with self._products():
            self._peak = step_peak_bytes(self._separate_step, digits.train.device)

    def train_epoch(self) -> float:
        """Train one epoch, then evaluate, outside the measured time.

        Returns:
            The epoch's mean training loss.
        """
        with self._products():
            self._train_losses.append(self._train())
            test_loss, self._test_accuracy = evaluate(self._model, self._digits.test, self.way.precision)
        self._test_losses.append(test_loss)
        return self._train_losses[-1]

    def _train(self) -> float:
        split = self._digits.train
        start = clock(split.device)
        total = torch.zeros((), device=split.device)
        order = torch.randperm(len(split), generator=self._order)
        for chosen in torch.split(order, self._plan.batch_size):
            self._step.batch = split.select(chosen)
            total += self._step() * len(chosen)
            self._schedule.step()
            self._record_scale()
        self._epoch_seconds.append(clock(split.device) - start)
        return total.item() / len(split)

    def _record_scale(self) -> None:
        if not self._step.scaler.is_enabled():
            return
        self._scales.append(self._step.scaler.get_scale())
        if not self._step.stepped():
            self._skipped_steps.append(len(self._scales))

    @property
    def learning_rate(self) -> float:
        """The schedule's current one: it has counted the steps that were made, not those that were skipped."""
        rate: float = self._step.optimizer.param_groups[0]["lr"]
        return rate

    def result(self) -> RunResult:
        """The numbers of the epochs so far; training may go on afterwards."""
        with self._products():
            ops_by_dtype, casts = _observed(self._separate_step())
        held = self._step.held()
        return RunResult(
            model=self.name,
            precision=self.way.precision,
            parameters=sum(weight.numel() for weight in self._model.parameters()),
            train_losses=tuple(self._train_losses),
            test_losses=tuple(self._test_losses),
            test_accuracy=self._test_accuracy,
            epoch_seconds=tuple(self._epoch_seconds),
            peak_memory_bytes=self._peak,
            ops_by_dtype=ops_by_dtype,
            casts=casts,
            scales=tuple(self._scales),
            skipped_steps=tuple(self._skipped_steps),
            emulated=self._emulates,
            prepared=self.way.prepared,
            held_bytes={kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in held.items()},
        )

    @property
    def _emulates(self) -> bool:
        return self._plan.emulate_float16 and self.way.precision == "float16"

    def _products(self) -> AbstractContextManager[object]:
        return emulated_products() if self._emulates else nullcontext()

    def _separate_step(self) -> TrainingStep:
        # On a copy, so that measuring changes neither weights nor batch norm's statistics.
        batch = self._digits.train.select(torch.arange(min(self._plan.batch_size, len(self._digits.train))))
        return TrainingStep(copy.deepcopy(self._model), self.way, batch, self._plan)


def evaluate(model: nn.Module, split: Split, precision: Precision) -> tuple[float, float]:
    """Loss and accuracy on `split`; the model's training mode is put back."""
    was_training = model.training
    model.eval()
    with torch.no_grad(), region(precision, split.device):
        logits = model(split.images).float()
        loss = functional.cross_entropy(logits, split.labels).item()
    model.train(was_training)
    return loss, (logits.argmax(1) == split.labels).double().mean().item()


def _observed(step: TrainingStep) -> tuple[dict[str, int], int]:
    """Which dtypes autocast chose in one forward pass with its loss, and how many casts that took."""
    with observe(step.batch.device.type) as observed:
        step.loss()
    dtypes = Counter(call.output_dtype or "other" for call in observed.calls)
    return dict(sorted(dtypes.items())), sum(call.casts for call in observed.calls)
