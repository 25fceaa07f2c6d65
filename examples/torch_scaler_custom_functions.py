"""Autograd functions of your own under a scaler: what they get in ``backward`` is scaled, what they return must be too.

Run it with ``python examples/torch_scaler_custom_functions.py``; it takes a few seconds. How such functions live in an
autocast region is in ``torch_custom_function.py``; this is the side of the scaler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mezzo.torch import GradScaler, autocast, custom_bwd, custom_fwd


class Product(torch.autograd.Function):
    """A function of listed ops, in the region's dtype. Its backward is linear, so a scale passes through it."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply the other way round."""
        a, b = ctx.saved_tensors
        return gradient.mm(b.t()), a.t().mm(gradient)


class SquareInFloat32(torch.autograd.Function):
    """A function that needs float32: inputs are cast, autocast is off inside, gradients come back in float16."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Square."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Compute the gradient of the square."""
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class FromElsewhere(torch.autograd.Function):
    """A function one cannot change, which insists on float32."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        """Shift the input."""
        if x.dtype is not torch.float32:
            msg = f"FromElsewhere takes float32, got {x.dtype}"
            raise TypeError(msg)
        return x + 1

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        """Pass the gradient on."""
        return gradient


class Bounded(torch.autograd.Function):
    """A function whose backward is not linear: it bounds what flows back, so it has to know the scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: Tensor) -> Tensor:
        """Pass the input on."""
        ctx.save_for_backward(bound)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Bound the gradient."""
        (bound,) = ctx.saved_tensors
        return torch.minimum(gradient, bound).maximum(-bound), None


def step(scaler: GradScaler, *, half: bool, scale_bound: bool = True) -> tuple[float, Tensor]:
    """Train a weight through all four functions for 100 steps.

    Args:
        scaler: It scales, or is switched off.
        half: Run in a float16 region.
        scale_bound: Give `Bounded` its bound times the scale.

    Returns:
        The last loss and the weight.
    """
    torch.manual_seed(0)
    x, wanted = torch.randn(64, 16), torch.randn(64, 8)
    weight = nn.Parameter(torch.randn(16, 8) / 4)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(100):
        optimizer.zero_grad()
        bound = torch.tensor(1e-3)
        # The scale as a tensor, without asking the device for it: whatever is scaled is times the scale.
        bound = scaler.scale(bound) if scale_bound else bound
        with autocast("cpu", dtype=torch.float16, enabled=half):
            y = SquareInFloat32.apply(Product.apply(x, weight))
            with autocast("cpu", enabled=False):
                y = FromElsewhere.apply(y.float())
            loss = nn.functional.mse_loss(Bounded.apply(y, bound), wanted)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item(), weight.detach()


def main() -> None:
    """Train in float32, and in float16 with and without a bound that is scaled."""
    loss, exact = step(GradScaler("cpu", enabled=False), half=False)
    print(f"float32: loss {loss:.4f}")
    for name, scale_bound in (("bound times the scale", True), ("bound as it is", False)):
        loss, weight = step(GradScaler("cpu", init_scale=2.0**12), half=True, scale_bound=scale_bound)
        off = ((weight - exact).norm() / exact.norm()).item()
        print(f"float16, {name}: loss {loss:.4f}, weight off by {off:.1%}, at most 2%: {off < 0.02}")


if __name__ == "__main__":
    main()
