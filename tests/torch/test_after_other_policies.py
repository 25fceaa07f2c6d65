"""Plain ``torch.autocast`` regions stay what they are, whatever policies have been used in the process before.

Run in a process of its own: first natively, over the op database, then after kernels of mezzo's have been registered for
every op that can have one.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import warnings

warnings.simplefilter("ignore")
import torch

from tests.torch.served import autocast_state, differences, outcome
from tests.torch.agreement import TOLERANCES, paired, samples

LOW = torch.bfloat16, torch.float16
PAIRINGS = "float32", "first low"
calls = {
    low: [(name, op, *paired(sample, pairing, low)) for pairing in PAIRINGS for name, op, sample in samples()]
    for low in LOW
}

def outcomes(low):
    with autocast_state("cpu", low):
        return [outcome(op, args, kwargs) for _, op, args, kwargs in calls[low]]

natively = {low: outcomes(low) for low in LOW}
from mezzo import Policy
from mezzo.torch import autocast
from mezzo.torch.kernels import installed_kernels

for default in ("promote", "fp32"):
    with autocast("cpu", policy=Policy("everything", default=default)):
        pass
with autocast("cpu", policy="fp32"), autocast("cpu", policy="unified"):
    pass
assert len(installed_kernels("cpu")) > 700, len(installed_kernels("cpu"))
for low in LOW:
    wrong = []
    for (name, *_), before, after in zip(calls[low], natively[low], outcomes(low), strict=True):
        if before.error is None:
            wrong += [f"{name}: {text}" for text in differences(before, after, rtol=TOLERANCES.get(name, 0.0))]
    print(low, "; ".join(wrong) or "nothing differs")
"""


@pytest.mark.slow
def test_native_regions_are_unchanged_by_what_was_registered() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [f"torch.{low} nothing differs" for low in ("bfloat16", "float16")]
    assert done.stdout.splitlines() == said, done.stdout[:4000]
