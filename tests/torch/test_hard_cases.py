"""Cases that once broke: each is the shortest program that did."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import mezzo.torch
from mezzo import Policy, builtin_policy
from mezzo.errors import RegionError
from mezzo.torch import autocast, observe, set_default_policy
from mezzo.torch.active import slot_for

EVERYTHING = [Policy("everything", default=default) for default in ("fp32", "lower_precision_fp", "promote")]


@pytest.mark.parametrize("policy", EVERYTHING, ids=lambda policy: str(policy.default))
def test_numbers_may_stand_for_tensors(policy: Policy) -> None:
    x = torch.rand(4) + 1
    for region in (autocast("cpu", policy=policy), torch.autocast("cpu")):
        with region:
            for result in (x * 2.0, 2 * x, x + 1, 1 - x, x / 3, 3 / x, x // 2, x % 2, torch.fmod(x, 2), x**2):
                assert result.shape == (4,)
            assert torch.equal(
                (torch.arange(3) * 0.5), torch.tensor([0.0, 0.5, 1.0], dtype=(torch.arange(3) * 0.5).dtype)
            )
            assert torch.ones(2).mul_(2.0).tolist() == [2.0, 2.0]
    with torch.autocast("cpu"):
        assert (x * 2.0).dtype is torch.float32
        attention = torch.nn.MultiheadAttention(8, 2)
        attention(*[torch.randn(3, 1, 8)] * 3)[0].sum().backward()


@pytest.mark.parametrize("policy", ["fp32", builtin_policy("unified").override({"batch_norm": "lower_precision_fp"})])
def test_optional_tensors_may_be_left_out(policy: object) -> None:
    x = torch.randn(4, 3, 5, 5)
    with autocast("cpu", policy=policy):
        assert torch.nn.BatchNorm2d(3, affine=False)(x).shape == x.shape
        assert torch.nn.InstanceNorm2d(3)(x).shape == x.shape
        assert F.batch_norm(x, torch.zeros(3), torch.ones(3)).shape == x.shape
    with autocast("cpu", policy=Policy("p", {"clamp": "fp32"})):
        assert torch.clamp(x, None, torch.ones(1)).max() <= 1


@pytest.mark.parametrize("rule", ["fp32", "lower_precision_fp"])
def test_batch_norm_keeps_its_parameters_and_updates_its_statistics(rule: str) -> None:
    net, x = torch.nn.BatchNorm2d(3), torch.randn(8, 3, 4, 4) + 2
    with autocast("cpu", policy=Policy("p", {"batch_norm": rule})):
        out = net(x)
    assert out.dtype is (torch.float32 if rule == "fp32" else torch.bfloat16)
    assert torch.allclose(net.running_mean, 0.1 * x.mean((0, 2, 3)), atol=2e-3)


def test_a_kept_cast_that_somebody_wrote_into_is_made_anew() -> None:
    with autocast("cpu", policy=Policy("none")):
        pass  # so that linear is served by mezzo, from the same casts as dropout
    weight = torch.nn.Parameter(torch.eye(4))
    with autocast("cpu", policy=Policy("low", default="lower_precision_fp")):
        F.dropout(weight, 0.1, training=False).mul_(3)
        assert torch.equal(F.linear(torch.eye(4), weight).float(), torch.eye(4))


def test_export_refuses_a_region_whose_policy_it_cannot_record() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with autocast("cpu", dtype=torch.bfloat16, policy="fp32"):
                return x @ x

    with pytest.raises(RegionError, match="records a region as PyTorch's own, without its policy 'fp32'"):
        torch.export.export(Model(), (torch.ones(2, 2),))
    assert mezzo.torch.active_policy("cpu").name == "torch"


@pytest.mark.parametrize("flags", [{"enabled": 1}, {"cache_enabled": 0}, {"enabled": 0, "cache_enabled": 1}])
def test_flags_may_be_anything_that_is_true_or_false(flags: dict[str, int]) -> None:
    with autocast("cpu", policy="fp32", **flags):
        assert torch.is_autocast_enabled("cpu") is bool(flags.get("enabled", True))
        assert torch.is_autocast_cache_enabled() is bool(flags.get("cache_enabled", True))


def test_the_default_policy_can_be_set_while_somebody_observes() -> None:
    x = torch.ones(2, 2)
    with observe("cpu") as seen:
        try:
            set_default_policy("unified")
            with torch.autocast("cpu"):
                assert (x @ x).softmax(-1).dtype is torch.float32
        finally:
            set_default_policy(None)
        with torch.autocast("cpu"):
            assert (x @ x).softmax(-1).dtype is torch.bfloat16
    assert [call.op for call in seen.calls] == ["aten::matmul", "aten::softmax.int", "aten::matmul"]


def test_observers_may_be_nested() -> None:
    x = torch.ones(2, 2)
    with observe("cpu") as outer, autocast("cpu"), observe("cpu") as inner:
        x @ x
        with autocast("cpu", policy="unified"):
            x @ x
    assert len(outer.calls) == len(inner.calls) == 2


# What a race decides is tried six times. Forked, before there is any thread: importing takes longer than all else.
EXIT = """
import os, threading, torch
from mezzo.torch import autocast

def work():
    with autocast("cpu", policy="unified"):
        torch.ones(2, 2) @ torch.ones(2, 2)

children = []
for _ in range(6):
    children.append(os.fork())
    if not children[-1]:
        break
if children[-1]:
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
else:
    threads = [threading.Thread(target=work) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_processes_end_well_after_threads_had_regions() -> None:
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, f"{[0] * 6}\n"), done.stderr


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: autocast([]), ValueError),
        (lambda: observe("nonsense").__enter__(), RuntimeError),
        (lambda: observe("meta").__enter__(), RuntimeError),
        (lambda: mezzo.torch.active_policy("nonsense"), RuntimeError),
        (lambda: Policy("p").override({}, name=3), ValueError),
        (lambda: Policy("p", {"aten::softmx": "fp32"}), LookupError),
        (lambda: Policy("p", {"atn::softmax": "fp32"}), LookupError),
        (lambda: Policy("p", {"a::b::c": "fp32"}), LookupError),
        (lambda: Policy("p", {"mylib::op": "opaque"}), ValueError),
        (lambda: Policy("p", {torch.softmax: "fp32"}), ValueError),
        (lambda: builtin_policy("torch").explain(torch.softmax), LookupError),
        (lambda: builtin_policy("torch").diff("unified"), ValueError),
        (lambda: mezzo.torch.custom_fwd(device_type="cpu", cast_inputs="float32"), TypeError),
    ],
)
def test_wrong_arguments_are_refused_with_the_error_that_is_promised(call: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()  # type: ignore[operator]


def test_a_region_leaves_nothing_in_pytorchs_thread_state() -> None:
    """What makes the processes above end well, without the luck of a race."""
    with autocast("cpu", policy="unified"), autocast("cpu", policy="fp32"):
        pass
    assert not torch._C._is_key_in_tls(slot_for("cpu").key)
