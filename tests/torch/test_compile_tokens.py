"""Tokens: what stands for policies in compiled code, when there are too few, and across processes and threads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mezzo
from mezzo.torch import autocast, observe
from mezzo.torch.active import slot_for
from mezzo.torch.tokens import DEVICES, read

TOO_MANY = """
import torch, mezzo
from mezzo.torch import autocast

torch._dynamo.config.recompile_limit = 64
OPS = ("linear", "softmax.int", "gelu", "mm", "bmm")
net, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1)), torch.ones(2, 4)
refused = wrong = 0
for number in range(32):
    rules = {op: "fp32" if number >> place & 1 else "lower_precision_fp" for place, op in enumerate(OPS)}
    region = autocast("cpu", dtype=torch.bfloat16, policy=mezzo.builtin_policy("default").override(rules))
    compiled = torch.compile(lambda x: net(x), backend="aot_eager", fullgraph=True)
    with region:
        eager = net(x)
        try:
            found = compiled(x)
            wrong += found.dtype != eager.dtype or not torch.equal(found, eager)
        except Exception as error:
            refused += 1
            assert "policies apart in a process, and the policy of this region came after them" in str(error), error
    assert not any(torch.is_autocast_enabled(device) for device in ("cpu", "maia", "ipu", "xla"))

def inside(x):
    with region:
        return net(x)

made_inside = mezzo.builtin_policy("unified").override({"mm": "fp32"})
def made(x):
    with autocast("cpu", dtype=torch.bfloat16, policy=made_inside):
        return net(x)

try:
    torch.compile(made, backend="aot_eager", fullgraph=True)(x)
except Exception as error:
    assert "Run it in eager code, or compile in a process that uses fewer policies" in str(error), error
    refused += 100
print(refused, wrong)
"""

ON_DISK = """
import json, sys, torch, mezzo
from torch._dynamo.utils import counters
from mezzo.torch import autocast

policy = mezzo.builtin_policy(sys.argv[1])

def run(where, size):
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    # Of a size of its own, so that what is kept for one place is not found from another.
    net, x = torch.nn.Sequential(torch.nn.Linear(size, 8), torch.nn.Softmax(-1)), torch.randn(4, size)

    def entered(x):
        with autocast("cpu", dtype=torch.bfloat16, policy=policy):
            return net(x)

    if where == "inside":
        found = torch.compile(entered, fullgraph=True)(x)
    elif where == "around, plain":
        mezzo.torch.set_default_policy(policy)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = torch.compile(net, fullgraph=True)(x)
        mezzo.torch.set_default_policy(None)
    else:
        with autocast("cpu", dtype=torch.bfloat16, policy=policy):
            found = torch.compile(net, fullgraph=True)(x)
    return (found - entered(x)).abs().max().item(), counters["aot_autograd"]["autograd_cache_hit"]

with torch.no_grad():
    print(json.dumps({where: run(where, 8 + place) for place, where in enumerate(sys.argv[2:])}))
"""

FIRST_IMPORT = """
import sys, torch
from mezzo.torch import autocast

torch.manual_seed(0)
net, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)), torch.randn(4, 8)
gradients = []
for compiles in (True, False):
    net.zero_grad()
    with autocast("cpu", dtype=torch.bfloat16):
        assert not compiles or "torch._dynamo" not in sys.modules
        out = torch.compile(net, backend="aot_eager", fullgraph=True)(x) if compiles else net(x)
    out.float().square().sum().backward()
    gradients.append([parameter.grad for parameter in net.parameters()])
print(all(map(torch.equal, *gradients)), any("mezzo" in type(finder).__module__ for finder in sys.meta_path))
"""


def run(code: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_policies_beyond_the_last_token_run_in_eager_code_and_are_refused_when_compiled() -> None:
    refused, wrong = map(int, run(TOO_MANY).split())
    assert wrong == 0
    assert refused > 100


def test_the_compiler_is_heard_of_if_it_is_first_imported_inside_of_a_region() -> None:
    assert run(FIRST_IMPORT) == "True False"


PLACES = ["around", "around, plain", "inside"]


@pytest.fixture(scope="module")
def kept_on_disk(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[float, int]]]:
    """What three processes found that compile one after the other with one folder, the third under another policy."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    return [json.loads(run(ON_DISK, policy, *PLACES, **cache)) for policy in ("unified", "unified", "fp32")]


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler, as Inductor does for the CPU"
)
@pytest.mark.parametrize("where", PLACES)
def test_code_kept_on_disk_is_found_again_under_its_own_policy_only(
    kept_on_disk: list[dict[str, tuple[float, int]]], where: str
) -> None:
    # Both policies get the first token of their process. Under the wrong one the difference would be 1e-3.
    assert all(found[where][0] < 1e-6 for found in kept_on_disk)
    assert [found[where][1] for found in kept_on_disk] == [0, 1, 0]


def token() -> list[str]:
    return [device for device in DEVICES if torch.is_autocast_enabled(device)]


def test_a_token_is_set_for_the_length_of_a_region_and_in_its_thread_only() -> None:
    with autocast("cpu", dtype=torch.bfloat16, policy="unified"), ThreadPoolExecutor(1) as pool:
        outer = token()
        assert outer
        assert pool.submit(token).result(timeout=30) == []
        with autocast("cpu", dtype=torch.bfloat16, policy="fp32"):
            assert read().actives["cpu"].policy.name == "fp32"
        assert token() == outer
        assert read().actives["cpu"].policy.name == "unified"
    assert token() == []


def test_a_token_stands_for_the_policies_of_all_devices() -> None:
    with autocast("cpu", policy="unified"):
        before = read()
        active = slot_for("cuda").current()
        found = slot_for("cuda").enter(active)
        both = read()
        slot_for("cuda").leave(found)
        assert read() is before
    assert {device: one.policy.name for device, one in both.actives.items()} == {"cpu": "unified", "cuda": "torch"}


def test_equal_policies_have_one_token() -> None:
    def made() -> mezzo.Policy:
        return mezzo.builtin_policy("unified").override({"mm": "fp32"})

    seen = set()
    for _ in range(3):
        with autocast("cpu", policy=made()):
            seen.add(read())
    assert len(seen) == 1


def test_an_observer_sees_the_ops_of_its_region_with_a_token_set() -> None:
    with observe("cpu") as seen, autocast("cpu", dtype=torch.bfloat16, policy="unified"):
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert [call.op for call in seen.calls] == ["aten::matmul"]


def test_threads_compile_each_under_its_own_policy() -> None:
    net, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1)), torch.ones(2, 4)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)

    def dtypes(policy: str) -> tuple[torch.dtype, torch.dtype]:
        with autocast("cpu", dtype=torch.bfloat16, policy=policy):
            return compiled(x).dtype, net(x).dtype

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(dtypes, ["unified", "torch"] * 4))
    torch.compiler.reset()
    assert found == [(torch.float32,) * 2, (torch.bfloat16,) * 2] * 4
