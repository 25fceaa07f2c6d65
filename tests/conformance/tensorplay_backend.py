"""TensorPlay on the CPU as a backend of the conformance tests."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import tensorplay

import mezzo.tensorplay
from mezzo import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mezzo import LossScaling, ScaleState
    from mezzo.builtin import PolicyLike

__all__ = ["TensorPlayBackend"]

Tensor = Any

INF, NAN = float("inf"), float("nan")
SLOPES = {Verdict.FINITE: [1.0, 1.0, 1.0], Verdict.INF: [1.0, INF, NAN], Verdict.NAN: [1.0, NAN, 1.0]}
"""The gradients before scaling that earn each verdict."""


class TensorPlayBackend:
    """`mezzo.tensorplay` on the CPU."""

    name = "tensorplay"
    low_dtypes = ("bfloat16", "float16")
    policies = ("default", "tensorplay", "unified", "fp32")

    def region(
        self, dtype: str | None = None, *, enabled: bool = True, policy: PolicyLike | None = None
    ) -> mezzo.tensorplay.autocast:
        low = None if dtype is None else getattr(tensorplay, dtype)
        return mezzo.tensorplay.autocast("cpu", dtype=low, enabled=enabled, policy=policy)

    def array(self, values: Sequence[Any], dtype: str) -> Tensor:
        return tensorplay.tensor(values, dtype=getattr(tensorplay, dtype))

    def numbers(self, array: Tensor) -> list[float]:
        return array.detach().double().flatten().tolist()

    def dtype_name(self, array: Tensor) -> str:
        return str(array.dtype).removeprefix("tensorplay.")

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right

    def softmax(self, array: Tensor) -> Tensor:
        return array.softmax(-1)

    def sum(self, array: Tensor) -> Tensor:
        return array.sum()

    def relu(self, array: Tensor) -> Tensor:
        return array.relu()

    def cross(self, left: Tensor, right: Tensor) -> Tensor:
        return tensorplay.cross(left, right, dim=-1)

    def gradient(self, function: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
        leaf = weight.clone().requires_grad_()
        (gradient,) = tensorplay.autograd.grad(function(leaf), leaf)
        return gradient

    def is_enabled(self) -> bool:
        return tensorplay.is_autocast_enabled("cpu")

    def scales(
        self, numbers: LossScaling, verdicts: Sequence[Verdict], *, start: ScaleState | None = None
    ) -> list[tuple[float, int]]:
        scaler = mezzo.tensorplay.GradScaler("cpu", **dataclasses.asdict(numbers))
        if start is not None:
            checkpoint = {"scale": start.scale, "_growth_tracker": start.growth_tracker}
            scaler.load_state_dict({**scaler.state_dict(), **checkpoint})
        weight = tensorplay.nn.Parameter(tensorplay.ones(3))
        optimizer = tensorplay.optim.SGD([weight], lr=0.0)
        reached = []
        for verdict in verdicts:
            optimizer.zero_grad()
            scaler.scale((weight * tensorplay.tensor(SLOPES[verdict])).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            state = scaler.state_dict()
            reached.append((scaler.get_scale(), state["_growth_tracker"]))
        return reached
