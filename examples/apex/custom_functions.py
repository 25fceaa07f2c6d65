"""Custom/user-defined autograd functions: which dtype they get at O1, said by a decorator or by registration.

``amp.half_function`` casts a function's float tensors to float16, ``amp.float_function`` to float32, and
``amp.promote_function`` to the widest among them. Decorators may come at any time; ``amp.register_...`` is for functions of
other people's modules, and comes before ``amp.initialize``. Run it with ``python examples/apex/custom_functions.py``. With
``from apex import amp`` in the place of the import below, ``python -m mezzo.apex custom_functions.py`` runs it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.apex import amp

SEEN: dict[str, str] = {}
"""In which dtypes the functions below have got their tensors."""


def note(name: str, *tensors: Tensor) -> None:
    """Write down dtypes."""
    SEEN[name] = ", ".join(str(each.dtype).removeprefix("torch.") for each in tensors)


class Product(torch.autograd.Function):
    """A product of matrices with a backward pass of its own: no op of PyTorch's, so no list has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply."""
        note("Product", x, weight)
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Give both gradients."""
        x, weight = ctx.saved_tensors
        note("Product's backward", grad)
        return grad @ weight, grad.t() @ x


class LogOfSum(torch.autograd.Function):
    """log(sum(exp(x))), which overflows in float16 from 12 on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute it as it is written."""
        note("LogOfSum", x)
        e = x.exp()
        ctx.save_for_backward(e)
        return e.sum(-1).log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Give the softmax times the gradient."""
        (e,) = ctx.saved_tensors
        return grad.unsqueeze(-1) * e / e.sum(-1, keepdim=True)


product = amp.half_function(Product.apply)
log_of_sum = amp.float_function(LogOfSum.apply)


@amp.promote_function
def mixture(x: Tensor, y: Tensor) -> Tensor:
    """Take two tensors of one dtype."""
    note("mixture", x, y)
    return torch.stack([x, y]).mean(0)


def square(x: Tensor) -> Tensor:
    """Stand for a function of a module that is not yours, whose source you leave alone."""
    note("square", x)
    return x * x


class Net(nn.Module):
    """A net of these functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Give a number for each row."""
        hidden = self.first(x)  # float16
        hidden = mixture(product(hidden, self.second.weight), hidden.float())
        return log_of_sum(20 * torch.tanh(hidden)) + square(hidden).mean(-1)


def gradients(*, low: bool) -> list[Tensor]:
    """Run the net once, at O1 or in float32; gives the gradients of its parameters."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, enabled=low, opt_level="O1", loss_scale=128.0, verbosity=0)
    loss = model(torch.randn(64, 32)).mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    return [each.grad for each in model.parameters()]


def main() -> None:
    """Run the net in float32 and at O1, and say who got what."""
    exact = torch.cat([each.flatten() for each in gradients(low=False)])
    print("float32: " + "; ".join(f"{name} {dtypes}" for name, dtypes in SEEN.items()))
    amp.register_half_function(sys.modules[__name__], "square")  # before amp.initialize
    found = torch.cat([each.flatten() for each in gradients(low=True)])
    print("O1:      " + "; ".join(f"{name} {dtypes}" for name, dtypes in SEEN.items()))
    off = ((found - exact).norm() / exact.norm()).item()
    print(f"gradients are off float32's by {off:.2%}, at most 1%: {off < 0.01}")


if __name__ == "__main__":
    main()
