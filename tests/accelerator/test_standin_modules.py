"""The stand-in accelerator, continued: modules, optimizers, files, its records, and kernels that others register."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import standin_backend
import torch
from standin_backend import calls
from torch import Tensor, nn

from .runs import D, same


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params, **how: torch.optim.SGD(params, lr=0.1, momentum=0.9, **how),
    "Adam": lambda params, **how: torch.optim.Adam(params, lr=0.1, **how),
    "AdamW": lambda params, **how: torch.optim.AdamW(params, lr=0.1, **how),
}


class TestModulesAndOptimizers:
    def test_a_module_moves_with_parameters_and_buffers(self) -> None:
        net = small_net()
        names = [name for name, _ in net.named_parameters()]
        assert net.to(D) is net
        assert {tensor.device.type for tensor in (*net.parameters(), *net.buffers())} == {D}
        assert [name for name, _ in net.named_parameters()] == names
        assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf for p in net.parameters())
        net.half()
        assert net(torch.ones(2, 4, device=D, dtype=torch.float16)).dtype is torch.float16
        net.to("cpu")
        assert {tensor.device.type for tensor in (*net.parameters(), *net.buffers())} == {"cpu"}
        assert net.standin()[0].weight.device.type == D

    @pytest.mark.parametrize("how", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
    @pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
    def test_training_equals_the_cpu_s(self, make: Callable[..., torch.optim.Optimizer], how: dict[str, bool]) -> None:
        def train(device: str) -> list[Tensor]:
            net = small_net().to(device)
            optimizer = make(net.parameters(), **how)
            inputs = torch.randn(16, 4).to(device)
            for _ in range(5):
                optimizer.zero_grad()
                net(inputs).square().mean().backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                optimizer.step()
            return [*net.parameters(), *net.buffers()]

        assert all(same(there.detach(), here.detach()) for there, here in zip(train(D), train("cpu"), strict=True))

    def test_foreach_is_used_when_asked_for_only(self) -> None:
        # PyTorch lists this device among those with foreach kernels, but asks for tensors of its own classes too.
        def ran(**how: bool) -> set[str]:
            x = torch.ones(2, device=D, requires_grad=True)
            optimizer = torch.optim.SGD([x], lr=0.1, **how)
            x.sum().backward()
            with calls() as ran:
                optimizer.step()
            return {call.op for call in ran}

        assert ran() == {"add_"}
        assert ran(foreach=True) == {"_foreach_add_"}
        assert ran(fused=True) == {"_fused_sgd_"}

    def test_deepcopy_pickle_and_state_dict(self) -> None:
        net = small_net().to(D)
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert all(
                isinstance(b, nn.Parameter) and b.requires_grad and torch.equal(a, b) and a is not b
                for a, b in zip(net.parameters(), other.parameters(), strict=True)
            )
            other[0].weight.data.zero_()
            assert net[0].weight.abs().sum().item() > 0

    def test_a_state_goes_to_a_file_to_the_cpu_and_back(self) -> None:
        net = small_net().to(D)
        file = io.BytesIO()
        torch.save({name: value.cpu() for name, value in net.state_dict().items()}, file)
        torch.save(net.state_dict(), there := io.BytesIO())
        file.seek(0)
        there.seek(0)
        here = torch.load(file)
        assert {value.device.type for value in here.values()} == {"cpu"}
        for state in (here, torch.load(there)):
            other = small_net().to(D)
            nn.init.zeros_(other[0].weight)
            other.load_state_dict(state)
            assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


class TestRecords:
    def test_ops_and_dtypes_in_order_with_those_of_the_backward_pass(self) -> None:
        x = torch.ones(2, 2, device=D, requires_grad=True)
        with calls() as ran:
            x.to(torch.bfloat16).mm(torch.ones(2, 2, device=D, dtype=torch.bfloat16)).sum().backward()
        half, single = torch.bfloat16, torch.float32
        assert [call[:3] for call in ran if call.op in ("_to_copy", "mm", "sum")] == [
            ("_to_copy", (single,), half),
            ("mm", (half, half), half),
            ("sum", (half,), half),
            ("mm", (half, half), half),
            ("_to_copy", (half,), single),
        ]
        assert not any(call.host_read for call in ran)
        before = list(ran)
        torch.ones(2, device=D).add_(1)
        assert ran == before

    @pytest.mark.parametrize(
        ("work", "reads"),
        [
            (lambda x: x.sum().item(), 1),
            (lambda x: float(x[0]), 1),
            (lambda x: bool(x[0] > 0), 1),
            (lambda x: x.cpu(), 1),
            (lambda x: x.to("cpu", torch.float16), 1),
            (lambda x: torch.empty(3).copy_(x), 1),
            (lambda x: x.to("cpu", non_blocking=True), 0),
            (lambda x: torch.empty(3).copy_(x, non_blocking=True), 0),
            (lambda x: torch.equal(x, x), 1),
            (lambda x: x.nonzero(), 1),
            (lambda x: x[x > 0], 1),
            (lambda x: (x * 2).sum(), 0),
            (lambda x: x[torch.tensor([0, 1], device=D)], 0),
            (lambda x: torch.where(x.isfinite().all(), x, 0), 0),
            (lambda x: x.copy_(torch.ones(3)), 0),
        ],
    )
    def test_host_reads_are_marked(self, work: Callable[[Tensor], Any], reads: int) -> None:
        x = torch.ones(3, device=D)
        with calls() as ran:
            work(x)
        assert sum(call.host_read for call in ran) == reads

    def test_the_cpu_s_autocast_does_not_reach_into_the_device(self) -> None:
        x = torch.ones(2, 2, device=D)
        with calls() as ran, torch.autocast("cpu", dtype=torch.bfloat16):
            x @ x
        assert [call[:3] for call in ran] == [("mm", (torch.float32, torch.float32), torch.float32)]


class TestKernelsOfOthers:
    def test_a_registered_kernel_wins(self) -> None:
        x = torch.full((3,), 2.0, device=D, requires_grad=True)
        library = torch.library.Library("aten", "IMPL")
        try:
            library.impl("erfinv", lambda tensor: tensor * 100, "PrivateUse1")
            assert torch.erfinv(x).tolist() == [200.0] * 3
        finally:
            library._destroy()
        assert torch.erfinv(x).isnan().all().item()

    def test_without_one_the_ops_of_scaling_are_missing(self) -> None:
        # In a process of its own, since register_accelerator has supplied them in this one.
        program = (
            f"import sys; sys.path.insert(0, {str(Path(standin_backend.__file__).parent)!r})\n"
            "import torch, standin_backend\n"
            "number, count = torch.ones((), device='standin'), torch.zeros((), device='standin', dtype=torch.int32)\n"
            "for op in (lambda: torch._amp_update_scale_(number, count, number, 2.0, 0.5, 1),\n"
            "           lambda: torch._amp_foreach_non_finite_check_and_unscale_([number], number, number)):\n"
            "    try: op()\n"
            "    except NotImplementedError as error: print(error)\n"
            "print(hasattr(torch.standin, 'get_amp_supported_dtype'))\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        assert (done.returncode, done.stderr, len(lines)) == (0, "", 3)
        assert lines[0].startswith("Could not run 'aten::_amp_update_scale_' with arguments from the 'standin' backend")
        assert lines[1].startswith("Could not run 'aten::_amp_foreach_non_finite_check_and_unscale_'")
        assert lines[2] == "False"
