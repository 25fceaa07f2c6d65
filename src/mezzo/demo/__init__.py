"""The main job, `mezzo demo`: real digits, two nets, float32 beside bfloat16 and float16, with numbers to compare.

Needs the extra `demo` (PyTorch, scikit-learn, matplotlib, rich). Trains with JAX too where JAX, Flax and Optax are
installed, and with TensorPlay where that is. Importing it imports no framework.
"""

from __future__ import annotations

from mezzo.demo.job import run_demo
from mezzo.demo.results import JaxResult, RunResult, TensorPlayResult, Trained

__all__ = ["run_demo", "Trained", "RunResult", "JaxResult", "TensorPlayResult"]
