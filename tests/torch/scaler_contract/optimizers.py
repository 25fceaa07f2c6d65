"""A small custom optimizer, with and without the contract of gradient scaling, and some that write down what they see."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

ABSENT = "absent"
Closure = Callable[[], Tensor]


class Momentum(torch.optim.Optimizer):
    """Heavy ball: ``velocity = momentum * velocity + gradient``, ``parameter -= lr * velocity``.

    Args:
        parameters: What is optimized.
        lr: How far a step goes.
        momentum: How much of the last step is kept.
        scaled: Whether it unscales gradients and skips steps itself, on the device, as a scaler's contract has it.
            All else in a script stays as it is.
    """

    def __init__(
        self, parameters: Iterable[Any], lr: float = 0.1, momentum: float = 0.5, *, scaled: bool = False
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self._step_supports_amp_scaling = scaled

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Tensor | None:
        """Step with ``grad_scale`` and ``found_inf`` where a scaler has set them; the host reads neither."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group, _there(grad_scale, parameter), _there(found_inf, parameter))
        return loss

    def _move(
        self, parameter: Tensor, group: dict[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        gradient = parameter.grad if grad_scale is None else parameter.grad / grad_scale
        state = self.state[parameter]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(parameter)
        velocity = group["momentum"] * state["velocity"] + gradient
        moved = group["lr"] * velocity
        if found_inf is not None:
            skip = found_inf != 0
            velocity = torch.where(skip, state["velocity"], velocity)
            moved = torch.where(skip, torch.zeros_like(moved), moved)
        state["velocity"] = velocity
        parameter.sub_(moved)


def _there(number: Tensor | None, parameter: Tensor) -> Tensor | None:
    """The number on the parameter's device: a scaler gives it on one, and the parameters may lie on several."""
    return None if number is None else number.to(parameter.device, non_blocking=True)


class Watched(Momentum):
    """Writes down what a scaler shows it during each step, and what `step` was called with; raises on demand."""

    answer: object = None
    failing = False

    def __init__(self, parameters: Iterable[Any], *, scaled: bool = True, **numbers: float) -> None:
        super().__init__(parameters, scaled=scaled, **numbers)
        self.seen: list[dict[str, Any]] = []
        self.called_with: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append({name: getattr(self, name, ABSENT) for name in ("grad_scale", "found_inf")})
        self.called_with.append((args, kwargs))
        if self.failing:
            message = "no step today"
            raise ArithmeticError(message)
        super().step()
        return self.answer


class OldForm(torch.optim.SGD):
    """Asks for the scaler itself, as `step(grad_scaler=)`, the contract's first form, has it."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self._step_supports_amp_scaling = True
        self.scalers: list[object] = []

    def step(self, closure: Closure | None = None, *, grad_scaler: Any = None) -> Any:
        self.scalers.append(grad_scaler)
        assert not hasattr(self, "grad_scale")
        assert not hasattr(self, "found_inf")
        if grad_scaler is not None:
            grad_scaler.unscale_(self)
            if sum(grad_scaler._found_inf_per_device(self).values()):
                return "skipped"
        super().step(closure)
        return "stepped"


def shown(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer itself, not its class, holds under the contract's names."""
    return {name: value for name, value in vars(optimizer).items() if name in {"grad_scale", "found_inf"}}


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter of these values; of 1 and 2 for none."""
    return nn.Parameter(torch.tensor(values or (1.0, 2.0), dtype=dtype))


def backward(scaler: torch.amp.GradScaler, weight: Tensor, factor: float = 1.0) -> None:
    """Give ``weight`` a scaled gradient that is ``factor`` everywhere."""
    scaler.scale((weight * factor).sum()).backward()
