"""Which lower precision this machine has no fast kernels for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["slow_on_cpu", "slow_on_cuda", "slow_reason"]

_CPU_NEEDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "x86_64": {
        "float16": ("avx512_fp16", "amx_fp16", "avx10_2", "avx_ne_convert"),
        "bfloat16": ("avx512_bf16", "amx_bf16", "avx10_2", "avx_ne_convert"),
    },
    "arm64": {"float16": ("fp16_arith",), "bfloat16": ("bf16", "sve_bf16")},
}
_ALIASES = {"amd64": "x86_64", "aarch64": "arm64"}
_CUDA_NEEDS = {"float16": (7, 0), "bfloat16": (8, 0)}


def slow_on_cpu(dtype: str, capabilities: Mapping[str, Any]) -> str:
    """Say why matrix products in a dtype are slow on a CPU.

    Args:
        dtype: ``"float16"`` or ``"bfloat16"``.
        capabilities: What the CPU has, as ``torch.cpu.get_capabilities()`` gives it.

    Returns:
        The reason; empty if they are fast or nothing is known of such a CPU.

    Source: oneDNN's page on data types: float16 needs AVX512-FP16 or AMX-FP16, bfloat16 AVX512-BF16 or AMX-BF16, and CPUs
    with AVX-NE-CONVERT have both.

    Example:
        >>> slow_on_cpu("float16", {"architecture": "x86_64", "avx512_bf16": True})
        'this CPU has none of avx512_fp16, amx_fp16, avx10_2, avx_ne_convert'
        >>> slow_on_cpu("bfloat16", {"architecture": "x86_64", "avx512_bf16": True})
        ''
    """
    kind = str(capabilities.get("architecture", ""))
    needs = _CPU_NEEDS.get(_ALIASES.get(kind, kind), {}).get(dtype, ())
    if not needs or any(capabilities.get(name) for name in needs):
        return ""
    return f"this CPU has none of {', '.join(needs)}" if len(needs) > 1 else f"this CPU has no {needs[0]}"


def slow_on_cuda(dtype: str, capability: tuple[int, int]) -> str:
    """Say why matrix products in a dtype are slow on an NVIDIA GPU.

    Args:
        dtype: ``"float16"`` or ``"bfloat16"``.
        capability: Its compute capability.

    Returns:
        The reason; empty if they are fast.

    Source: CUDA C++ Programming Guide, "Compute Capabilities": tensor cores for float16 from 7.0, for bfloat16 from 8.0.

    Example:
        >>> slow_on_cuda("bfloat16", (7, 5))
        'this GPU has compute capability 7.5, and tensor cores work in bfloat16 from 8.0 on'
    """
    needs = _CUDA_NEEDS.get(dtype)
    if needs is None or capability >= needs:
        return ""
    has = ".".join(map(str, capability))
    return f"this GPU has compute capability {has}, and tensor cores work in {dtype} from {needs[0]}.{needs[1]} on"


def slow_reason(dtype: str, device: str) -> str:
    """Say why matrix products in a dtype are slow on this machine's device.

    Args:
        dtype: ``"float16"`` or ``"bfloat16"``.
        device: A device type, ``"cpu"`` or ``"cuda"``.

    Returns:
        The reason; empty if they are fast, if this machine has no such device, or if nothing is known of it.

    Example:
        >>> slow_reason("float64", "cpu")
        ''
    """
    if device == "cpu":
        asked = getattr(torch.cpu, "get_capabilities", None)  # not in every release
        return slow_on_cpu(dtype, asked()) if asked else ""
    if device == "cuda" and torch.version.hip is None and torch.cuda.is_available():
        return slow_on_cuda(dtype, torch.cuda.get_device_capability())
    return ""
