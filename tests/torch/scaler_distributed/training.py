"""Short trainings with injected overflows, and what is to be the same on all ranks afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.scaling import LossScaling, Verdict

STEPS = 14
OVERFLOWS = (2, 5, 6, 11)
"""The steps at which a gradient is made non-finite."""

NUMBERS: dict[str, Any] = {"init_scale": 2.0**6, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
INF = float("inf")
NAN = float("nan")


def build(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A small net, the same each time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(step: int, rows: slice = slice(None)) -> Tensor:
    """Some rows, of eight, of the data of a step."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 + step))[rows]


def mean_square(model: nn.Module, data: Tensor) -> Tensor:
    return model(data).float().square().mean()


def spoil(parameters: Iterable[Tensor], value: float) -> None:
    """Write one non-finite number to this rank's part of the first gradient of which it holds one."""
    for parameter in parameters:
        gradient = parameter.grad
        held = getattr(gradient, "_local_tensor", gradient)
        if held is not None and held.numel():
            held.view(-1)[0] = value
            return
    raise AssertionError("this rank holds no gradient to spoil")


def train(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], Tensor | None],
    before_step: Callable[[int], None] = lambda step: None,
    *,
    steps: int = STEPS,
) -> dict[str, list[Any]]:
    """Train, and give scale and tracker after each step.

    Args:
        scaler: mezzo's, or PyTorch's as the reference.
        optimizer: One optimizer.
        loss: Of the step's number; None where this rank has no loss.
        before_step: Called between `backward` and `scaler.step`.
        steps: How many.
    """
    seen: dict[str, list[Any]] = {"scale": [], "tracker": []}
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(step)
        if value is not None:
            scaler.scale(value).backward()
        before_step(step)
        scaler.step(optimizer)
        scaler.update()
        seen["scale"].append(scaler.get_scale())
        seen["tracker"].append(scaler._get_growth_tracker())
    return seen


def values(model: nn.Module) -> list[Tensor]:
    """The parameters as plain whole tensors."""
    with torch.no_grad():
        return [
            (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).clone().detach()
            for parameter in model.parameters()
        ]


def expected(verdicts: Sequence[Verdict], **numbers: Any) -> dict[str, list[Any]]:
    """Scale and tracker after each verdict, by the pure rule."""
    rule = LossScaling(**{**NUMBERS, **numbers})
    state = rule.start()
    seen: dict[str, list[Any]] = {"scale": [], "tracker": []}
    for verdict in verdicts:
        state = rule.next(state, verdict)
        seen["scale"].append(state.scale)
        seen["tracker"].append(state.growth_tracker)
    return seen


def usual() -> list[Verdict]:
    """The verdicts of a training with the overflows above."""
    return [Verdict.INF if step in OVERFLOWS else Verdict.FINITE for step in range(STEPS)]


def assert_same(results: Sequence[dict[str, Any]], *, parameters: bool = True) -> dict[str, Any]:
    """All ranks saw the same scales and trackers, and hold bitwise the same parameters, all of them finite."""
    first = results[0]
    for rank, result in enumerate(results):
        assert result["scale"] == first["scale"], f"scales of rank {rank}"
        assert result["tracker"] == first["tracker"], f"trackers of rank {rank}"
        for one, other in zip(first["parameters"], result["parameters"], strict=True) if parameters else ():
            assert torch.equal(one, other), f"parameters of rank {rank}"
        assert all(value.isfinite().all() for value in result["parameters"])
    return first


def assert_near(result: dict[str, Any], reference: dict[str, Any], **tolerance: float) -> None:
    """Scales and trackers are the reference's, and so are the parameters within a tolerance, by default none."""
    assert result["scale"] == reference["scale"]
    assert result["tracker"] == reference["tracker"]
    bounds = tolerance or {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(result["parameters"], reference["parameters"], **bounds)
