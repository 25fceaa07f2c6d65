"""Plain ``torch.autocast`` regions stay what they are, whatever policies have been used in the process before.

Run in a process of its own: first natively, over the op database, then after kernels of mezzo's have been registered for
every op that can have one.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import warnings

warnings.simplefilter("ignore")
import torch

from tests.torch.served import autocast_state, differences, outcome
from tests.torch.test_agreement_opinfo import TOLERANCES, paired, samples

low = getattr(torch, sys.argv[1])
calls = [(name, op, *paired(sample, pairing, low)) for pairing in ("float32", "first low") for name, op, sample in samples()]

def outcomes():
    with autocast_state("cpu", low):
        return [outcome(op, args, kwargs) for _, op, args, kwargs in calls]

natively = outcomes()
from mezzo import Policy
from mezzo.torch import autocast
from mezzo.torch.kernels import installed_kernels

for default in ("promote", "fp32"):
    with autocast("cpu", low, policy=Policy("everything", default=default)):
        pass
with autocast("cpu", low, policy="fp32"), autocast("cpu", low, policy="unified"):
    pass
assert len(installed_kernels("cpu")) > 700, len(installed_kernels("cpu"))
afterwards = outcomes()
wrong = []
for (name, *_), before, after in zip(calls, natively, afterwards, strict=True):
    if before.error is None:
        wrong += [f"{name}: {text}" for text in differences(before, after, rtol=TOLERANCES.get(name, 0.0))]
print(len(calls), "calls")
print("\\n".join(wrong) or "nothing differs")
"""


@pytest.mark.slow
@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_native_regions_are_unchanged_by_what_was_registered(low: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, low], capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[1:] == ["nothing differs"], done.stdout[:4000]
