"""Whose autocast the tests of faults run under; with ``--amp torch`` each of them fails."""

from __future__ import annotations

import sys

import pytest
import torch

from .amps import Amp


@pytest.fixture
def amp(request: pytest.FixtureRequest) -> Amp:
    """Give the autocast that ``--amp`` names, with the random numbers seeded."""
    name = request.config.getoption("--amp")
    if name == "torch":
        # mezzo's kernels, once registered, would be in PyTorch's way.
        assert "mezzo.torch" not in sys.modules, "run tests/torch/faults alone under --amp torch"
    torch.manual_seed(0)
    return Amp(name)
