"""mezzo.jax works without optax, until a function is called that wraps its optimizers."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["optax"] = None
from mezzo.jax import GradScaler, loss_scaled, master_weights
GradScaler.create().update(False)
for wrap in (master_weights, loss_scaled):
    try:
        wrap(None)
    except ModuleNotFoundError as error:
        print(error)
"""


def test_the_wrappers_say_that_optax_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"mezzo.jax.{name} wraps optimizers of optax, which is not installed; run `pip install optax`."
        for name in ("master_weights", "loss_scaled")
    ]
