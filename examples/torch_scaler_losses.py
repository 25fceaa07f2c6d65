"""Two losses of very different size over one body: a scaler per loss, merged before the step.

Run it with ``python examples/torch_scaler_losses.py``; it takes a few seconds.

One scale cannot serve both: where the large loss overflows float16, the small one's gradients are still below its
smallest number. It is what ``num_losses`` was for in the removed ``apex.amp``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mezzo.torch import GradScaler, autocast, step_merged

LARGE, SMALL = 1e3, 1e-8


class TwoHeads(nn.Module):
    """A body and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(32, 64)
        self.large, self.small = nn.Linear(64, 1), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Give both outputs."""
        hidden = torch.tanh(self.body(x))
        return self.large(hidden), self.small(hidden)


def losses(net: TwoHeads, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the large loss and the small one."""
    large, small = net(x)
    return LARGE * nn.functional.mse_loss(large, y), SMALL * nn.functional.mse_loss(small, -y)


def step_of_one_scaler(net: TwoHeads, optimizer: torch.optim.Optimizer, scaler: GradScaler, data: list[Tensor]) -> None:
    """Step with one scaler for both losses."""
    with autocast("cpu", dtype=torch.float16):
        large, small = losses(net, *data)
    scaler.scale(large + small).backward()
    scaler.step(optimizer)
    scaler.update()


def step_of_two_scalers(
    net: TwoHeads, optimizer: torch.optim.Optimizer, scalers: list[GradScaler], data: list[Tensor]
) -> None:
    """Step with a scaler per loss."""
    with autocast("cpu", dtype=torch.float16):
        both = losses(net, *data)
    for scaler, loss in zip(scalers, both, strict=True):
        # What this backward pass adds is unscaled by this scaler and checked for this loss alone.
        with scaler.merge(optimizer):
            scaler.scale(loss).backward(retain_graph=loss is both[0])
    step_merged(optimizer, scalers)  # one step, if all were finite
    for scaler in scalers:
        scaler.update()  # each moves its own scale


def train(kind: str) -> tuple[TwoHeads, list[float], list[float]]:
    """Train until 150 steps are made.

    Args:
        kind: "float32", "one scaler" or "two scalers".

    Returns:
        The net, both losses and the scales at the end.
    """
    torch.manual_seed(0)
    net = TwoHeads()
    # A learning rate per loss; the body stays, so that each head can be compared alone.
    optimizer = torch.optim.SGD(
        [
            {"params": net.body.parameters(), "lr": 0.0},
            {"params": net.large.parameters(), "lr": 0.01 / LARGE},
            {"params": net.small.parameters(), "lr": 0.01 / SMALL},
        ]
    )
    scalers = [GradScaler("cpu") for _ in range(2 if kind == "two scalers" else 1)]
    x = torch.randn(64, 32)
    y = torch.tanh(x.sum(1, keepdim=True))
    made: list[int] = []
    optimizer.register_step_post_hook(lambda *_: made.append(1))  # not those that are skipped to find the scale
    while len(made) < 150:
        optimizer.zero_grad()
        if kind == "two scalers":
            step_of_two_scalers(net, optimizer, scalers, [x, y])
        elif kind == "one scaler":
            step_of_one_scaler(net, optimizer, scalers[0], [x, y])
        else:
            sum(losses(net, x, y)).backward()
            optimizer.step()
    with torch.no_grad():
        final = [(value / size).item() for value, size in zip(losses(net, x, y), (LARGE, SMALL), strict=True)]
    return net, final, [scaler.get_scale() for scaler in scalers]


def main() -> None:
    """Train in float32, with one scaler, and with two."""
    exact, (large, small), _ = train("float32")
    print(f"float32:     large loss {large:.4f}, small loss {small:.4f}")
    for kind in ("one scaler", "two scalers"):
        net, (large, small), scales = train(kind)
        off = ((net.small.weight - exact.small.weight).norm() / exact.small.weight.norm()).item()
        shown = " and ".join(f"2**{math.log2(scale):.0f}" for scale in scales)
        print(
            f"{kind + ':':<12} large loss {large:.4f}, small loss {small:.4f}, scale {shown};"
            f" small head off by {off:.1%}, at most 5%: {off < 0.05}"
        )


if __name__ == "__main__":
    main()
