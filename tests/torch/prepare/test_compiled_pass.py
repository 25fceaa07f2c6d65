"""Compiled steps are close to PyTorch's own, and are compiled once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mezzo import Policy
from mezzo.torch import autocast
from mezzo.torch.masters import compiled_pass
from mezzo.torch.masters.params import Master
from mezzo.torch.masters.single_pass import Flat, flatten

from .single_pass_pairs import ADAM, ADAMW, BF16, VARIANTS, Pair, kinds, making

# torch.compile's own, at its first use.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")

COMPILED = ("adamw amsgrad maximize", "adam decay", "adam low beta1", "sgd decay", "sgd dampening")
"""Each compiles once, for a second or more."""


@pytest.mark.parametrize(("kind", "options"), [VARIANTS[name] for name in COMPILED], ids=COMPILED)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
def test_compiled_steps_are_close_to_those_of_the_optimizer(kind: Any, options: dict[str, Any], fused: bool) -> None:
    options = dict(options)
    if not fused and isinstance(options.get("lr"), Tensor):
        options["lr"] = float(options["lr"])
    pair = Pair(making(kind, **options, fused=fused), [(7,), (1,), (), (0,), (20001,), (150, 200)])
    for _ in range(20):
        pair.step(compiled=True)
    pair.assert_close(20)


def test_nothing_is_compiled_again_for_new_numbers_sizes_and_optimizers() -> None:
    Pair(making(ADAMW, fused=False)).step(compiled=True)
    before = dict(compiled_pass._kernels)
    stats = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for size in (1, 2, 15, 16, 17, 4096, 100_003):
        pair = Pair(making(ADAMW, fused=False, lr=0.1 / size, betas=(0.8, 0.9)), [(size,), (2, size)])
        for _ in range(2):
            pair.step(compiled=True)
        pair.assert_close(2)
    assert dict(compiled_pass._kernels) == before
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == stats


def test_a_function_that_is_compiled_inside_a_region_has_none_of_its_casts() -> None:
    policy = Policy("all low", dict.fromkeys(["add", "sub", "mul", "div", "sqrt", "maximum"], "lower_precision_fp"))
    # A formula that no other test here has, so that it is compiled here.
    pair = Pair(making(ADAM, fused=False, amsgrad=True, weight_decay=0.2))
    known = len(compiled_pass._kernels)
    with autocast("cpu", dtype=BF16, policy=policy):
        pair.give_gradients()
        assert pair.update(compiled=True) == pair.masters
    assert len(compiled_pass._kernels) == known + 1
    pair.own.step()
    pair.assert_close(1)


def test_threads_that_begin_at_once_compile_once_and_step_right() -> None:
    # A formula that no other test here has.
    pairs = [Pair(making(ADAMW, fused=False, amsgrad=True, weight_decay=0.0)) for _ in range(4)]
    for pair in pairs:
        pair.give_gradients()
    known = len(compiled_pass._kernels)
    barrier, failures = threading.Barrier(len(pairs)), []

    def work(pair: Pair) -> None:
        barrier.wait()
        try:
            assert pair.update(compiled=True) == pair.masters
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(compiled_pass._kernels) == known + 1
    for pair in pairs:
        pair.own.step()
        pair.assert_close(1)


WITHOUT_COMPILER = """
import torch
from torch import nn
from mezzo.errors import PreparationError
from mezzo.torch.masters.params import make_master
from mezzo.torch.masters.settings import Owner, Settings
from mezzo.torch.masters.single_pass import update_

low = nn.Parameter(torch.ones(20000, dtype=torch.bfloat16))
master = make_master(torch.ones(20000), low, Owner(Settings(torch.bfloat16)))
optimizer = torch.optim.AdamW([master], fused=True)
low.grad = torch.ones_like(low)
try:
    update_(optimizer, optimizer.param_groups[0], compiled=True)
except PreparationError as error:
    print(error)
print("unchanged", bool((master.values() == 1).all() and (low == 1).all()), len(optimizer.state))
print("done", len(update_(optimizer, optimizer.param_groups[0], compiled=False)))
"""


def test_without_a_compiler_there_is_an_error_and_nothing_changes(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "CXX": str(tmp_path / "no-compiler"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], env=environment, capture_output=True, text=True, check=False
    )
    assert "compiled=True needs a compiler that torch.compile can use" in ran.stdout, ran.stdout + ran.stderr
    assert "call prepare with compiled=False" in ran.stdout
    assert "unchanged True 0\ndone 1" in ran.stdout


@pytest.mark.parametrize("skip", [True, False])
@kinds
def test_where_a_flag_is_not_read_on_the_host_it_decides_on_the_device(
    kind: Any, options: dict[str, Any], skip: bool
) -> None:
    # As it is on CUDA; here the flag is on the CPU, and the compiled function does the same.
    pair = Pair(making(kind, **options), [(20000,)])
    pair.step(compiled=True)
    before = pair.values()
    pair.give_gradients()
    if skip:
        pair.low[0].grad.fill_(torch.inf)  # type: ignore[union-attr]
    group, low, master = pair.one.param_groups[0], pair.low[0], pair.masters[0]
    flat = Flat(master, flatten(low.grad), flatten(master.values()), flatten(low))  # type: ignore[arg-type]
    with torch.no_grad():
        run = compiled_pass.kernel(pair.one, group, flat, scaled=False, guarded=True)
        compiled_pass.update_(pair.one, group, [flat], [run], None, torch.tensor(skip))
    if skip:
        assert all(torch.equal(a, b) for a, b in zip(before, pair.values(), strict=True))
    else:
        pair.own.step()
        pair.assert_close(2)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@kinds
def test_compiled_steps_on_cuda_are_close_to_the_optimizers(kind: Any, options: dict[str, Any], fused: bool) -> None:
    def on_cuda(parameters: Any) -> torch.optim.Optimizer:
        for one in parameters:
            one.data = one.data.cuda()
            if isinstance(one, Master):
                one.model_param.data = one.model_param.data.cuda()
        return kind(parameters, lr=0.01, fused=fused, **options)  # type: ignore[no-any-return]

    pair = Pair(on_cuda)
    for _ in range(5):
        for low, plain in zip(pair.low, pair.plain, strict=True):
            low.grad = torch.randn_like(low)
            plain.grad = low.grad.float()
        assert pair.update(compiled=True) == pair.masters
        pair.own.step()
    pair.assert_close(5)
    if fused:
        before = pair.values()
        pair.one.found_inf = torch.ones((), device="cuda")  # type: ignore[attr-defined]
        assert pair.update(compiled=True) == pair.masters
        assert all(torch.equal(a, b) for a, b in zip(before, pair.values(), strict=True))
