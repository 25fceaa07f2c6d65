"""Which lower precision a machine has no fast kernels for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mezzo.torch.linting.hardware import slow_on_cpu, slow_on_cuda, slow_reason

X86: dict[str, Any] = {"architecture": "x86_64", "avx2": True, "avx512_f": True}
ARM: dict[str, Any] = {"architecture": "arm64", "neon": True}


@pytest.mark.parametrize(
    ("dtype", "feature"),
    [
        ("float16", "avx512_fp16"),
        ("float16", "amx_fp16"),
        ("float16", "avx_ne_convert"),
        ("bfloat16", "avx512_bf16"),
        ("bfloat16", "amx_bf16"),
    ],
)
def test_an_x86_cpu_is_fast_with_one_of_the_instructions_and_slow_without(dtype: str, feature: str) -> None:
    assert slow_on_cpu(dtype, X86 | {feature: True}) == ""
    assert feature in slow_on_cpu(dtype, X86 | {feature: False})


def test_a_cpu_may_be_fast_in_bfloat16_alone() -> None:
    cpu = X86 | {"avx512_bf16": True}
    assert slow_on_cpu("bfloat16", cpu) == ""
    assert slow_on_cpu("float16", cpu).startswith("this CPU has none of avx512_fp16")


def test_an_arm_cpu_is_judged_by_its_own_features() -> None:
    assert slow_on_cpu("float16", ARM) == "this CPU has no fp16_arith"
    assert slow_on_cpu("float16", ARM | {"fp16_arith": True}) == ""
    assert slow_on_cpu("bfloat16", ARM | {"bf16": True}) == ""


def test_nothing_is_said_of_an_unknown_cpu_or_of_float32() -> None:
    assert slow_on_cpu("float16", {"architecture": "riscv64"}) == ""
    assert slow_on_cpu("float16", {}) == ""
    assert slow_on_cpu("float32", X86) == ""


@pytest.mark.parametrize(("dtype", "first"), [("float16", (7, 0)), ("bfloat16", (8, 0))], ids=["float16", "bfloat16"])
def test_a_gpu_is_fast_from_a_compute_capability_on(dtype: str, first: tuple[int, int]) -> None:
    assert slow_on_cuda(dtype, first) == ""
    assert slow_on_cuda(dtype, (9, 0)) == ""
    assert f"from {first[0]}.0 on" in slow_on_cuda(dtype, (first[0] - 1, 5))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_this_machines_cpu_is_judged_by_what_pytorch_says_of_it(dtype: str) -> None:
    assert slow_reason(dtype, "cpu") == slow_on_cpu(dtype, torch.cpu.get_capabilities())
    assert slow_reason(dtype, "mps") == ""
