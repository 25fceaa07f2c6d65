"""Autocast as a decorator: on ``forward`` of a model, on a function, and by ``autocast_decorator``.

Run it with ``python examples/tensorplay_decorator.py``; it takes a second.
"""

from __future__ import annotations

from typing import Any

import tensorplay
from tensorplay import nn

from mezzo.tensorplay import autocast, autocast_decorator


class AutocastModel(nn.Module):
    """A model whose ``forward`` brings its region along."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 4)

    @autocast(device_type="cpu")
    def forward(self, x: Any) -> Any:
        """Give four numbers for each row."""
        return self.head(self.norm(self.hidden(x)).relu())


@autocast(device_type="cpu", dtype=tensorplay.float16)
def product(a: Any, b: Any) -> Any:
    """Multiply, and again if the product is large: a recursion, which ends each region that it begins."""
    c = a.mm(b)
    return product(c, b) if c.abs().max().item() > 100 else c


def main() -> None:
    """Call them outside of any region."""
    tensorplay.manual_seed(0)
    x = tensorplay.randn(16, 8)
    model = AutocastModel()
    output = model(x)
    output.float().square().mean().backward()
    print(f"forward: output {output.dtype}, gradient {model.head.weight.grad.dtype}")

    low = product(tensorplay.full((4, 4), 40.0), tensorplay.full((4, 4), 0.125))
    print(f"function: {low.dtype}, autocast afterwards: {tensorplay.is_autocast_enabled('cpu')}")

    multiply = autocast_decorator(autocast("cpu", enabled=False), lambda a, b: a.mm(b))
    with autocast("cpu"):
        print(f"autocast_decorator: {multiply(x, x.t()).dtype} where autocast is on around it")


if __name__ == "__main__":
    main()
