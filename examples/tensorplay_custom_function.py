"""Autograd functions of your own in a region: one of ops that autocast knows, one that needs float32.

Run it with ``python examples/tensorplay_custom_function.py``; it takes a second.
"""

from __future__ import annotations

from typing import Any

import tensorplay
from tensorplay import nn

from mezzo.tensorplay import autocast, custom_bwd, custom_fwd


class MyMM(tensorplay.autograd.Function):
    """A function with multiple inputs and an autocastable op: backward runs in the state of its forward."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        """Multiply."""
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Any) -> tuple[Any, Any]:
        """Multiply the other way round."""
        a, b = ctx.saved_tensors
        left = grad.mm(b.t())
        print(f"  backward of MyMM computes in {left.dtype}")
        return left, a.t().mm(grad)


class MyFloat32Func(tensorplay.autograd.Function):
    """A function that needs float32: its inputs are cast, and autocast is off inside."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=tensorplay.float32)
    def forward(ctx: Any, x: Any) -> Any:
        """Compute exp."""
        fwd_output = x.exp()
        ctx.save_for_backward(fwd_output)
        return fwd_output

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Any) -> Any:
        """Compute its gradient."""
        (fwd_output,) = ctx.saved_tensors
        return grad * fwd_output


def main() -> None:
    """Run both in a region, backward outside of it, and with float64."""
    tensorplay.manual_seed(0)
    mymm, func = MyMM.apply, MyFloat32Func.apply
    # The first argument of the process's first call is a Parameter: TensorPlay then forgets its gradient, mezzo does not.
    weight, x = nn.Parameter(tensorplay.rand(4, 4)), tensorplay.rand(4, 4)
    with autocast(device_type="cpu", dtype=tensorplay.bfloat16):
        low = mymm(weight, x)
        # func runs in float32, regardless of the surrounding autocast state
        output = func(low)
    print(f"MyMM {low.dtype}, MyFloat32Func {output.dtype}, needs a gradient: {output.requires_grad}")
    output.sum().backward()
    print(f"gradient of the weight: {weight.grad.dtype}, all positive: {(weight.grad > 0).all().item()}")
    with autocast(device_type="cpu", dtype=tensorplay.bfloat16):
        print(f"MyFloat32Func of float64: {func(tensorplay.rand(4, dtype=tensorplay.float64)).dtype}")


if __name__ == "__main__":
    main()
