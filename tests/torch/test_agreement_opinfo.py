"""mezzo's kernels against PyTorch's over PyTorch's op database, in processes of their own (`agreement`).

Starting one takes longer than the calls on tensors without data do, so the devices with those share one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


FAKE = ("cuda", "xpu", "mps", "mtia")


@cache
def reports(*devices: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Compare on some devices in one process."""
    command = [sys.executable, "-m", "tests.torch.agreement", *devices]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == list(devices)
    return found  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", *FAKE])
def test_every_listed_call_agrees(device: str) -> None:
    """On the CPU in dtype and to the last bit, elsewhere in dtype, on tensors without data."""
    found = reports(*(["cpu"] if device == "cpu" else FAKE))[device]
    assert len(found) == (8 if device == "cpu" else 2)
    for key, result in found.items():
        assert not result["wrong"], f"{key}:\n" + "\n".join(result["wrong"])
        assert result["compared"] > 150, key
        assert result["ops"] > (70 if device == "cpu" else 60), key
