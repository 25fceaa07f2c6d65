"""Every example runs by itself, warns of nothing, and says what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

EXPECTED = {
    "torch_train_cpu.py": r"bfloat16 +unified +0\.\d{4} +9\d\.\d%",
    "torch_inference.py": r"traced: +output torch\.bfloat16, three runs equal to eager: True",
    "torch_custom_function.py": r"backward of Product runs in torch\.float32 under 'fp32'",
    "torch_policy.py": r"in torch\.float16: x @ x is torch\.float32 with largest value 360000",
    "torch_steer_trainer.py": r"fp32 +last loss \d\.\d{4}; in one step 5 ops in float32",
}
"""Name of the script to a pattern of the line that matters."""


def run(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(("name", "line"), EXPECTED.items(), ids=EXPECTED)
def test_example_runs_and_says(name: str, line: str) -> None:
    done = run(name)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(line, done.stdout), done.stdout


def test_every_example_for_pytorch_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("torch_*.py")} == set(EXPECTED)
