"""JAX's part of the demo: a net in every precision."""

from __future__ import annotations

import platform
from functools import partial
from typing import TYPE_CHECKING, Any

import flax
import jax
import optax  # type: ignore[import-untyped]

from mezzo.demo.jax_report import jax_table
from mezzo.demo.jax_run import JaxRun
from mezzo.demo.parts import Finished
from mezzo.demo.results import PRECISIONS
from mezzo.demo.turns import train_in_turn

if TYPE_CHECKING:
    from rich.console import Console

    from mezzo.demo.arrays import ArrayPart
    from mezzo.demo.results import Plan


class JaxPart:
    """The runs of JAX.

    Args:
        device: A device's type, with its number or without: "cpu", "cuda:1". None takes what JAX prefers.
        alone: Whether PyTorch has no part. If it has one, the name is PyTorch's, and what JAX has not of it gives JAX's
            preferred device.

    Raises:
        ValueError: If the device is not there.
    """

    def __init__(self, device: str | None, *, alone: bool) -> None:
        self._device = pick_jax_device(device, strict=alone)

    def train(self, plan: Plan, digits: tuple[ArrayPart, ArrayPart], console: Console) -> Finished:
        """Train every run, on as many threads of the CPU as XLA takes."""
        train, test = digits
        where = describe(self._device)
        console.print(
            f"JAX: {len(train)} digits to train on, {len(test)} to test; {plan.epochs} epochs per run, on {where}"
        )
        group = {f"JAX {precision}": partial(JaxRun, train, test, precision, plan) for precision in PRECISIONS}
        with jax.default_device(self._device):
            runs = train_in_turn([group], plan.epochs, console, busy="compiling")
            results = [run.result() for run in runs]
        return Finished(results, plan, self._setting(), tables=(jax_table(results, where),))

    def _setting(self) -> dict[str, Any]:
        config: Any = jax.config  # its options are no part of its type
        return {
            "jax": jax.__version__,
            "flax": flax.__version__,
            "optax": optax.__version__,
            "jax_device": {"type": self._device.platform, "name": describe(self._device)},
            # None lets XLA take TF32 for "float32" products on a GPU.
            "jax_matmul_precision": config.jax_default_matmul_precision,
        }


def pick_jax_device(requested: str | None, *, strict: bool = True) -> jax.Device:
    """Decide where to train: as asked, else where JAX does.

    Args:
        requested: A platform's name, such as "cpu" or "cuda", with a number after a colon or without.
        strict: Whether it must be there; otherwise JAX's default device takes its place.

    Raises:
        ValueError: If it is not there.

    Example:
        >>> pick_jax_device("cpu").platform
        'cpu'
    """
    if requested is None:
        return jax.devices()[0]
    kind, _, number = requested.partition(":")
    try:
        return jax.devices(kind)[int(number or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        if not strict:
            return jax.devices()[0]
        message = f"JAX has no device {requested!r} here; use 'cpu' or leave the device out."
        raise ValueError(message) from error


def describe(device: jax.Device) -> str:
    """A name for people: the accelerator's, or the processor's architecture."""
    return f"{platform.machine()} CPU, XLA's threads" if device.platform == "cpu" else device.device_kind
