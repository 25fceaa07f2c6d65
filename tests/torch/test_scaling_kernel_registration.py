"""The Python kernels of gradient scaling on a backend that lacks them: registered once, where missing, for good."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mezzo.torch.scaling_kernels import register_scaling_kernels

ROOT = Path(__file__).parents[2]


def test_a_backend_with_kernels_of_its_own_keeps_them():
    assert register_scaling_kernels("CPU") == ()


def run_on_the_stand_in(program: str) -> str:
    start = f"import sys\nsys.path.insert(0, {str(ROOT / 'examples')!r})\nimport torch, standin_backend\n"
    start += "from mezzo.torch.scaling_kernels import *\n"
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", start + program], capture_output=True, text=True, timeout=120, check=False
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_threads_that_register_at_once_register_each_kernel_once_and_for_good():
    out = run_on_the_stand_in(
        """
import gc, threading
barrier, names = threading.Barrier(8), []
def register():
    barrier.wait()
    names.extend(register_scaling_kernels())
threads = [threading.Thread(target=register) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
gc.collect()
print(names, register_scaling_kernels())
gradient, found, half = (torch.tensor(number, device="standin") for number in ([8.0, float("inf")], 0.0, 0.5))
torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, half)
print(gradient.tolist(), found.tolist())
"""
    )
    assert out.splitlines() == [
        "['_amp_foreach_non_finite_check_and_unscale_', '_amp_update_scale_'] ()",
        "[4.0, inf] 1.0",
    ]


def test_only_what_a_backend_lacks_is_registered():
    out = run_on_the_stand_in(
        """
own = torch.library.Library("aten", "IMPL")
own.impl("_amp_update_scale_", lambda scale, *_: scale.fill_(42), "PrivateUse1")
print(register_scaling_kernels())
scale, found = torch.ones((), device="standin"), torch.zeros((), device="standin")
print(torch._amp_update_scale_(scale, torch.zeros((), dtype=torch.int32, device="standin"), found, 2.0, 0.5, 2).tolist())
"""
    )
    assert out.splitlines() == ["('_amp_foreach_non_finite_check_and_unscale_',)", "42.0"]


def test_the_other_variants_come_with_the_two_kernels_and_versions_count_as_with_pytorch():
    program = """
inf = float("inf")
def show(device):
    gradient, found, half = (torch.tensor(number, device=device) for number in ([8.0, inf], 0.0, 0.5))
    outs = [torch.zeros(2, device=device), torch.zeros((), device=device)]
    (new,), flag = torch.ops.aten._amp_foreach_non_finite_check_and_unscale([gradient], found, half)
    print(new.tolist(), flag.tolist(), gradient.tolist(), found.tolist())
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale.out([gradient], found, half, out=outs[:1])
    print(outs[0].tolist(), gradient.tolist(), found.tolist())
    leaf = torch.ones(2, device=device, requires_grad=True)
    torch._amp_foreach_non_finite_check_and_unscale_([leaf], found, half)
    print(leaf.tolist(), leaf.is_leaf, leaf._version, found._version)
    scale, tracker, found = torch.ones((), device=device), torch.ones((), dtype=torch.int32, device=device), found * 0
    new, count = torch.ops.aten._amp_update_scale(scale, tracker, found, 1.1, 0.9, 2)
    print(new.tolist(), count.tolist(), scale.tolist(), tracker.tolist())
    torch.ops.aten._amp_update_scale.out(scale, tracker, found, 1.1, 0.9, 2, out=outs[1])
    print(outs[1].tolist(), scale.tolist(), tracker.tolist(), scale._version, tracker._version)
    torch._amp_update_scale_(scale, tracker, found, 1.1, 0.9, 2)
    print(scale.tolist(), tracker.tolist(), scale._version, tracker._version)
register_scaling_kernels()
show("standin")
show("cpu")
"""
    lines = run_on_the_stand_in(program).splitlines()
    assert len(lines) == 12
    assert lines[:6] == lines[6:]
