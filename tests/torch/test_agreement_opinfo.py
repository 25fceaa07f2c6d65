"""mezzo's kernels against PyTorch's over PyTorch's op database, each device in a process of its own (`agreement`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=["cpu", "cuda", "xpu", "mps", "mtia"])
def report(request: pytest.FixtureRequest) -> tuple[str, dict[str, dict[str, Any]]]:
    command = [sys.executable, "-m", "tests.torch.agreement", request.param]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return request.param, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_listed_call_agrees(report: tuple[str, dict[str, dict[str, Any]]]) -> None:
    """On the CPU in dtype and to the last bit, elsewhere in dtype, on tensors without data."""
    device, found = report
    assert len(found) == (8 if device == "cpu" else 2)
    for key, result in found.items():
        assert not result["wrong"], f"{key}:\n" + "\n".join(result["wrong"])
        assert result["compared"] > 150, key
        assert result["ops"] > (70 if device == "cpu" else 60), key
