"""The main job, `mezzo demo`: real digits, two nets, float32 beside bfloat16 and float16, with numbers to compare.

Needs the extra `demo` (PyTorch, scikit-learn, matplotlib, rich).
"""

from __future__ import annotations

from mezzo.demo.job import run_demo
from mezzo.demo.results import RunResult

__all__ = ["run_demo", "RunResult"]
