"""A custom op that returns float32: all is right, and the region saves half of what it should.

The op has a kernel of its own, which computes in float32 for accuracy, and nobody rounds its result. The layers that follow
it take what comes, so they compute in float32, keep float32 for the backward pass, and each convolution casts once more.

Run it with ``python examples/diagnose/float32_custom_op.py``; it takes a few seconds. ``--dtype float32`` trains without a
region, ``--cured`` rounds the op's result, and ``docs/diagnose.md`` tells how the place is found.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


@torch.library.custom_op("story::soft_sign", mutates_args=())
def soft_sign(x: Tensor) -> Tensor:
    """Give x / (1 + abs(x)), in float32 whatever comes."""
    wide = x.float()
    return wide / (1 + wide.abs())


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return (gradient.float() / (1 + x.float().abs()).square()).to(x.dtype)


soft_sign.register_autograd(_backward, setup_context=_keep)


def rounded_soft_sign(x: Tensor) -> Tensor:
    """Give what the op gives, in the dtype that came: the cure."""
    return soft_sign(x).to(x.dtype)


class Block(nn.Module):
    """A convolution, the custom op, and what follows a convolution."""

    def __init__(self, came: int, gives: int, activation: Callable[[Tensor], Tensor]) -> None:
        """Make the parts."""
        super().__init__()
        self.activation = activation
        self.conv = nn.Conv2d(came, gives, 3, padding=1)
        self.norm = nn.BatchNorm2d(gives)

    def forward(self, x: Tensor) -> Tensor:
        """Give as many pixels as came."""
        return self.norm(self.activation(self.conv(x))).relu()


class Net(nn.Module):
    """Four blocks and a head."""

    def __init__(self, activation: Callable[[Tensor], Tensor], width: int = 32) -> None:
        """Make the parts."""
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width if place else 1, width, activation) for place in range(4)))
        self.pool = nn.AvgPool2d(4)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Give the logits of ten digits."""
        return self.head(self.pool(self.blocks(images)).flatten(1))


def train(dtype: torch.dtype, *, cured: bool) -> None:
    """Train for one epoch, and say how that went and what was kept for the backward pass."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    torch.manual_seed(0)
    net = Net(rounded_soft_sign if cured else soft_sign)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    kept: dict[tuple[int, int], int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape[:1] == (50,) and tensor.is_floating_point():  # activations, and not the casts of weights
            kept[tensor.data_ptr(), tensor.numel()] = tensor.nbytes
        return tensor

    for start in range(0, 1500, 50):
        optimizer.zero_grad()
        kept.clear()
        with (
            torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            loss = nn.functional.cross_entropy(net(images[start : start + 50]), labels[start : start + 50])
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}, {sum(kept.values()) / 1024:.0f} KiB of activations kept for the backward pass")


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--cured", action="store_true")
    arguments = parser.parse_args()
    train(getattr(torch, arguments.dtype), cured=arguments.cured)


if __name__ == "__main__":
    main()
