"""An optimizer of one's own: first as anyone writes it, then with the contract that spares the host read.

Run it with ``python examples/torch_scaler_custom_optimizer.py``; it takes a few seconds. The training loop is the same
for both; only the constructor changes. The rules are in docs/scaling.md, "The contract with optimizers".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.torch import GradScaler, autocast


class SignMomentum(torch.optim.Optimizer):
    """Moves each weight by the sign of its running mean gradient, and counts its steps. It knows nothing of scaling."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Make one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._move(param, group["lr"], group["beta"])
        return loss

    def _move(self, param: Tensor, lr: float, beta: float) -> None:
        state = self._state_of(param)
        state["mean"].lerp_(param.grad, 1 - beta)
        state["steps"] += 1
        param.add_(state["mean"].sign(), alpha=-lr)

    def _state_of(self, param: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        if not state:
            state.update(mean=torch.zeros_like(param), steps=torch.zeros((), device=param.device))
        return state


class SignMomentumOnDevice(SignMomentum):
    """The same with the contract: it is always called, unscales by itself and leaves out a bad step on the device."""

    _step_supports_amp_scaling = True

    def _move(self, param: Tensor, lr: float, beta: float) -> None:
        # Both are set by the scaler for the time of the call, and there is neither without a scaler.
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is None:
            super()._move(param, lr, beta)
            return
        bad = found_inf.to(param.device, non_blocking=True) > 0
        grad = param.grad
        if grad_scale is not None:  # None after unscale_
            grad = grad / grad_scale.to(param.device, non_blocking=True)
        state = self._state_of(param)
        # `where` and not a product with 0: that would be NaN where the gradient is.
        state["mean"].copy_(torch.where(bad, state["mean"], state["mean"].lerp(grad, 1 - beta)))
        state["steps"] += torch.where(bad, 0.0, 1.0)
        param.sub_(torch.where(bad, 0.0, lr * state["mean"].sign()))


class HostReads(TorchDispatchMode):
    """Counts how often a value is brought from the device to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See an op go by."""
        self.count += func is torch.ops.aten._local_scalar_dense.default  # noqa: SLF001 - the op behind item()
        return func(*args, **(kwargs or {}))


def train(make: Callable[..., torch.optim.Optimizer]) -> tuple[float, float, Tensor, float, int]:
    """Train for one epoch of 30 steps in float16; the fourth meets an Inf.

    Args:
        make: The constructor of the optimizer.

    Returns:
        The first and last loss, the parameters, the steps that were made, and the host reads of scaler and optimizer.
    """
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = make(net.parameters(), lr=2e-3)
    scaler = GradScaler("cpu", init_scale=2.0**12)
    losses, reads = [], HostReads()
    for step, start in enumerate(range(0, 1500, 50)):
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(images[start : start + 50]), labels[start : start + 50])
        with reads:
            scaled = scaler.scale(loss)
        scaled.backward()
        if step == 3:
            net[0].weight.grad[0, 0] = torch.inf
        with reads:
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    parameters = torch.cat([p.detach().flatten() for p in net.parameters()])
    steps = optimizer.state[net[0].weight]["steps"].item()
    return losses[0], losses[-1], parameters, steps, reads.count


def main() -> None:
    """Train with both and compare."""
    results = []
    for make in (SignMomentum, SignMomentumOnDevice):
        first, last, parameters, steps, reads = train(make)
        results.append(parameters)
        name = make.__name__
        print(f"{name:<20} loss {first:.4f} -> {last:.4f}, {steps:.0f} of 30 steps, {reads} host reads")
    print(f"largest difference of their parameters: {(results[0] - results[1]).abs().max():.1e}")


if __name__ == "__main__":
    main()
