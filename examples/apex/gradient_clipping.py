"""Gradient clipping: by norm and by value, through ``amp.master_params(optimizer)``, at O1 and at O2.

When a ``scale_loss`` block ends gradients are unscaled, so they may be clipped at once. ``amp.master_params`` gives what the
optimizer steps with: float32 masters at O2, the model's parameters at O1. Run it with
``python examples/apex/gradient_clipping.py``; it takes a few seconds. With ``from apex import amp`` in the place of the
import below, ``python -m mezzo.apex gradient_clipping.py`` runs it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from mezzo.apex import amp

MAX_NORM, MAX_VALUE = 0.5, 0.01


def data() -> tuple[Tensor, Tensor]:
    """Make numbers to learn, always the same."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 32, generator=generator)
    return x, 5 * torch.tanh(x @ torch.randn(32, 4, generator=generator))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a net, always the same, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def clip(parameters: Any, how: str) -> None:
    """Clip the gradients of parameters in one of the two ways."""
    if how == "norm":
        clip_grad_norm_(parameters, MAX_NORM)
    else:
        clip_grad_value_(parameters, MAX_VALUE)


def train(how: str, opt_level: str | None) -> tuple[dict[str, Tensor], list[float], int]:
    """Train until 50 steps are made.

    Args:
        how: "norm" or "value".
        opt_level: A level, or None for float32 without amp.

    Returns:
        The weights, the size of the gradients in each step (their norm, or the largest one), and how many steps were
        skipped while the scale was found.
    """
    model, optimizer = make()
    if opt_level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    x, y = data()
    sizes: list[float] = []

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = [each.grad.flatten() for each in amp.master_params(optimizer) if each.grad is not None]
        if gradients:  # a skipped step has none
            sizes.append(torch.cat(gradients).norm(2 if how == "norm" else torch.inf).item())

    optimizer.register_step_pre_hook(look)
    iterations = 0
    while len(sizes) < 50:
        iterations += 1
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        if opt_level is None:
            loss.backward()
            clip(model.parameters(), how)
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            clip(amp.master_params(optimizer), how)  # after the block: gradients are unscaled here
        optimizer.step()
    return model.state_dict(), sizes, iterations - len(sizes)


def main() -> None:
    """Clip in both ways at both levels, and compare with float32."""
    for how, limit in (("norm", MAX_NORM), ("value", MAX_VALUE)):
        expected, _, _ = train(how, None)
        wanted = torch.cat([each.flatten() for each in expected.values()])
        for level in ("O1", "O2"):
            weights, sizes, skipped = train(how, level)
            off = ((torch.cat([each.flatten() for each in weights.values()]) - wanted).norm() / wanted.norm()).item()
            print(
                f"{how} at {level}: largest {max(sizes):.3f}, limit {limit}, skipped {skipped};"
                f" weights off float32's by {off:.2%}, at most 2%: {off < 0.02}"
            )


if __name__ == "__main__":
    main()
