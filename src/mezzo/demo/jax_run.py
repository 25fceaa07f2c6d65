"""One seeded training run in JAX: a precision; what it learned, what it cost, what compiling it took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mezzo.demo.jax_step import Training
from mezzo.demo.results import JaxResult
from mezzo.jax import explain
from mezzo.jax.residuals import bytes_kept

if TYPE_CHECKING:
    from collections.abc import Callable

    from mezzo.demo.arrays import ArrayPart
    from mezzo.demo.results import Plan, Precision

MODEL = "transformer"


class Part(NamedTuple):
    """A part of the data on JAX's device: images, float32, (samples, 8, 8); labels, int32, (samples,)."""

    images: jax.Array
    labels: jax.Array


class JaxRun:
    """Trains the net in one precision, epoch by epoch.

    The same arguments on the same machine give the same losses. An epoch is made of whole batches, as each shape would be
    compiled for; the samples that fill none are left out, and are others in each epoch.

    Args:
        train: What to train on.
        test: What to evaluate on.
        precision: "float32" without autocast, "bfloat16" under it, "float16" under it and with a gradient scaler.
        plan: How long, how fast, and the seed.
    """

    def __init__(self, train: ArrayPart, test: ArrayPart, precision: Precision, plan: Plan) -> None:
        self.precision = precision
        self._train, self._test = (
            Part(jnp.asarray(part.images), jnp.asarray(part.labels, jnp.int32)) for part in (train, test)
        )
        self._batch_size = min(plan.batch_size, len(train))
        self._batches = len(train) // self._batch_size
        self._order = np.random.default_rng(plan.seed)
        self._training = Training(precision, plan, steps=plan.epochs * self._batches)
        self._state = self._training.start()
        self._step: Callable[..., Any] | None = None
        self._evaluate: Callable[..., Any] | None = None
        self._compile_seconds = 0.0
        self._train_losses: list[float] = []
        self._test_losses: list[float] = []
        self._test_accuracy = 0.0
        self._epoch_seconds: list[float] = []
        self._scales: list[float] = []
        self._skipped_steps: list[int] = []

    def train_epoch(self) -> float:
        """Compile at the first call; train one epoch, then evaluate, outside the measured time.

        Returns:
            The epoch's mean training loss.
        """
        if self._step is None or self._evaluate is None:
            self._step, self._evaluate = self._compiled()
        self._train_losses.append(self._train_with(self._step))
        test_loss, accuracy = self._evaluate(self._state, *self._test)
        self._test_losses.append(float(test_loss))
        self._test_accuracy = float(accuracy)
        return self._train_losses[-1]

    def _compiled(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        chosen = np.zeros(self._batch_size, np.int32)
        start = time.perf_counter()
        step = jax.jit(self._training.step).lower(self._state, *self._train, chosen).compile()
        evaluate = jax.jit(self._training.evaluate).lower(self._state, *self._test).compile()
        self._compile_seconds = time.perf_counter() - start
        # The first run of a program sets it up; it is given away, so that it is in no epoch's time.
        jax.block_until_ready(step(self._state, *self._train, chosen))
        return step, evaluate

    def _train_with(self, step: Callable[..., Any]) -> float:
        order = self._order.permutation(len(self._train.labels))[: self._batches * self._batch_size]
        batches = order.astype(np.int32).reshape(self._batches, self._batch_size)
        made = []
        start = time.perf_counter()
        for chosen in batches:
            self._state, loss, finite = step(self._state, *self._train, chosen)
            made.append((loss, finite, self._state.scaler.scale))
        jax.block_until_ready(self._state)
        self._epoch_seconds.append(time.perf_counter() - start)
        # Read when all is done: to ask for a number after each step would make each wait.
        losses, finite, scales = (np.stack(column) for column in zip(*made, strict=True))
        if self._state.scaler.enabled:
            before = len(self._scales)
            self._skipped_steps.extend(before + index + 1 for index in np.flatnonzero(~finite).tolist())
            self._scales.extend(scales.tolist())
        return float(losses.mean())

    @property
    def steps_counted(self) -> int:
        """How many steps the optimizer has counted: those that were made, not those that were skipped."""
        (count,) = {int(leaf) for leaf in jax.tree.leaves(self._state.moments) if leaf.shape == ()}
        return count

    def result(self) -> JaxResult:
        """The numbers of the epochs so far; training may go on afterwards."""
        dots, casts = self._explained()
        return JaxResult(
            model=MODEL,
            precision=self.precision,
            parameters=sum(leaf.size for leaf in jax.tree.leaves(self._state.params)),
            train_losses=tuple(self._train_losses),
            test_losses=tuple(self._test_losses),
            test_accuracy=self._test_accuracy,
            epoch_seconds=tuple(self._epoch_seconds),
            scales=tuple(self._scales),
            skipped_steps=tuple(self._skipped_steps),
            compile_seconds=self._compile_seconds,
            kept_bytes=self._kept_bytes(),
            dots_by_dtype=dots,
            casts=casts,
        )

    def _batch(self) -> tuple[Any, ...]:
        first = slice(self._batch_size)
        return self._state.params, self._train.images[first], self._train.labels[first]

    def _explained(self) -> tuple[dict[str, int], int]:
        """How many products run in which dtype in a forward pass with its loss, and how many casts autocast put in."""
        # Without autocast there is nothing to explain; under a policy with float32 for all, it is the same program.
        options = {"policy": "fp32"} if self.precision == "float32" else {"dtype": self.precision}
        report = explain(self._training.plain_loss, **options)(*self._batch())
        dots: dict[str, int] = {}
        for dot in report.dots:
            name = " x ".join(dict.fromkeys(dot.used))
            dots[name] = dots.get(name, 0) + dot.count
        return dots, report.totals.casts

    def _kept_bytes(self) -> int:
        leaves, tree = jax.tree.flatten(self._batch())

        def loss(*arrays: Any) -> list[jax.Array]:
            return [self._training.loss(*jax.tree.unflatten(tree, arrays))]

        return bytes_kept(loss, leaves, range(len(jax.tree.leaves(self._state.params))))
