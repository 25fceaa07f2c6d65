"""Autograd functions of your own in a region: the three cases of PyTorch's page.

Run it with ``python examples/torch_custom_function.py``; it takes a second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mezzo.torch import active_policy, autocast, custom_bwd, custom_fwd


class Product(torch.autograd.Function):
    """A function of listed ops: it runs in the region's dtypes, and backward in those of its forward."""

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
        left = gradient.mm(b.t())
        print(f"  backward of Product runs in {left.dtype} under {active_policy('cpu').name!r}")
        return left, a.t().mm(gradient)


class ExpInFloat32(torch.autograd.Function):
    """A function that needs one dtype: its inputs are cast and autocast is off inside."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute exp."""
        output = x.exp()
        ctx.save_for_backward(output)
        return output

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Compute its gradient."""
        (output,) = ctx.saved_tensors
        return gradient * output


class FromElsewhere(torch.autograd.Function):
    """A function one cannot change, which insists on float32."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        """Double the input."""
        if x.dtype is not torch.float32:
            msg = f"FromElsewhere takes float32, got {x.dtype}"
            raise TypeError(msg)
        return x * 2

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        """Double the gradient."""
        return gradient * 2


def main() -> None:
    """Run each kind in a region and go backward outside of it."""
    torch.manual_seed(0)
    a, b = torch.rand(4, 4, requires_grad=True), torch.rand(4, 4, requires_grad=True)
    for policy in ("torch", "fp32"):
        with autocast("cpu", dtype=torch.bfloat16, policy=policy):
            low = Product.apply(a, b)
            exact = ExpInFloat32.apply(low)
            # Autocast off for this call alone, and the cast by hand.
            with autocast("cpu", enabled=False):
                doubled = FromElsewhere.apply(low.float())
        print(f"policy {policy!r}: Product {low.dtype}, ExpInFloat32 {exact.dtype}, FromElsewhere {doubled.dtype}")
        (exact + doubled).sum().backward()
    print(f"gradients of the leaves: {a.grad.dtype}")


if __name__ == "__main__":
    main()
