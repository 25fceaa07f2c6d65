"""Attention in evaluation on a CPU, which PyTorch computes in one piece without a look at the dtypes inside.

Each policy is the first one of a process: kernels that an earlier one has registered would hide what it does by itself.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import json, sys, torch
from torch import nn
import mezzo
from mezzo.torch import autocast

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
worst = {}
for name, call in calls.items():
    reference = call(x).detach()
    for low in (torch.float16, torch.bfloat16):
        for given in (x, x.to(low)) if sys.argv[1] in ("apex-o1", "default", "unified") else (x,):
            with torch.no_grad(), autocast("cpu", low, policy=POLICIES.get(sys.argv[1], sys.argv[1])):
                found = call(given).float()
            error = (found - reference).abs().max().item()
            worst[f"{name} {low} {given.dtype}"] = error if error == error else 1e9
print(json.dumps(worst))
"""


@pytest.mark.parametrize(
    "policy", ["apex-o1", "unified", "default", "torch", "fp32", "products", "linear", "softmax", "attention"]
)
def test_attention_in_evaluation_computes_what_it_does_in_float32(policy: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE, policy], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    worst = json.loads(done.stdout)
    assert len(worst) >= 4
    # Values are around 1; half of bfloat16's digits.
    assert max(worst.values()) < 0.06, worst
