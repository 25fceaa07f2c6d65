"""Attention in evaluation on a CPU, which PyTorch computes in one piece without a look at the dtypes inside.

Each policy is the first one of a process: kernels that an earlier one has registered would hide what it does by itself.
The processes are forked from one that has imported PyTorch and has no policy yet.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import json, os, sys, torch
from torch import nn
import mezzo
from mezzo.torch import autocast

torch.set_num_threads(1)  # there is nothing to fork but this thread

def biased(module):
    for name, one in module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(one, std=0.1)
    return module.eval()

POLICIES = {
    "products": mezzo.Policy("products", dict.fromkeys(("mm", "addmm", "bmm"), "lower_precision_fp")),
    "linear": mezzo.Policy("linear", {"linear": "lower_precision_fp"}),
    "softmax": mezzo.Policy("softmax", {"softmax": "fp32"}, repairs=False),
    "attention": mezzo.Policy("attention", {"_native_multi_head_attention": "fp32", "mm": "lower_precision_fp"}),
}
torch.manual_seed(0)
layer = biased(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True))
attention = biased(nn.MultiheadAttention(32, 4, batch_first=True))
x = torch.randn(8, 17, 32)
calls = {"layer": lambda x: layer(x), "attention": lambda x: attention(x, x, x, need_weights=False)[0]}
references = {name: call(x).detach() for name, call in calls.items()}

def worst(policy):
    found = {}
    for name, call in calls.items():
        for low in (torch.float16, torch.bfloat16):
            for given in (x, x.to(low)) if policy in ("apex-o1", "default", "unified") else (x,):
                with torch.no_grad(), autocast("cpu", low, policy=POLICIES.get(policy, policy)):
                    result = call(given).float()
                error = (result - references[name]).abs().max().item()
                found[f"{name} {low} {given.dtype}"] = error if error == error else 1e9
    return found

for policy in sys.argv[1:]:
    child = os.fork()
    if not child:
        print(json.dumps([policy, worst(policy)]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, policy
"""
NAMES = ("apex-o1", "unified", "default", "torch", "fp32", "products", "linear", "softmax", "attention")


@pytest.fixture(scope="module")
def worst() -> dict[str, dict[str, float]]:
    """The largest error of each call under each policy."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE, *NAMES], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("policy", NAMES)
def test_attention_in_evaluation_computes_what_it_does_in_float32(
    worst: dict[str, dict[str, float]], policy: str
) -> None:
    assert len(worst[policy]) >= 4
    # Values are around 1; half of bfloat16's digits.
    assert max(worst[policy].values()) < 0.06, worst[policy]
