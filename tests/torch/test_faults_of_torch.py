"""Each test in tests/torch/faults, which mezzo passes, fails under PyTorch's own amp: none is there for nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

FAULTS = Path(__file__).parent / "faults"
# The rows of the list of faults that PyTorch 2.13 still has; top13 is the one about transforms of autograd.
ROWS = set(
    "a1 a2 a4 a9 b1 b2 b5 b9 c1 c2 c5 c8 c13 d1 top13 h1 h3 h5 h8 "
    "e1 e2 e3 e4 e6 e8 f1 f2 f3 f4 f5 f6 f7 f9 f10 f15".split()
)
# What a fault looks like: a wrong value or dtype, an error over dtypes or over the order of calls, an attribute of the
# user's that is gone, or no function for it.
LOOKS = (
    "assert",
    "AssertionError",
    "RuntimeError",
    "NotImplementedError",
    "ValueError: Attempting to unscale FP16 gradients.",
    "AttributeError: module 'torch.amp'",
    "AttributeError: 'GradScaler' object has no attribute",
    "AttributeError: 'SGD' object has no attribute 'grad_scale'",
)


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the faults are those of PyTorch 2.13")
def test_every_fault_is_pytorchs(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    options = ["--amp", "torch", "--tb", "no", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", str(FAULTS), *options],
        check=False,
        cwd=FAULTS.parents[2],
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout[-2000:] + run.stderr[-2000:]
    messages: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        # A test that fails and leaves state behind is there twice, the second time with an error.
        found = messages.setdefault(f"{case.get('classname')}::{case.get('name')}", [])
        found += [failure.get("message", "") for failure in case.iter("failure")]
    assert [name for name, found in messages.items() if not found] == []
    assert [(name, said) for name, found in messages.items() for said in found if not said.startswith(LOOKS)] == []
    assert {name.rpartition("::")[2].split("_")[1] for name in messages} == ROWS
