"""How many programs are drawn, and whether they are the same at each run."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

import mezzo.torch

__all__ = ["profile"]

_COUNT = int(os.environ.get("MEZZO_RANDOM_PROGRAMS", "0"))

# PyTorch's dispatch keys of autocast look off only once it has been on; so leftovers are seen from here on.
with mezzo.torch.autocast("cpu"):
    pass


def profile(examples: int) -> Any:
    """Give the settings of a test: a fixed set of programs, or as many random ones as the environment asks for."""
    return settings(
        max_examples=_COUNT or examples,
        derandomize=not _COUNT,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
