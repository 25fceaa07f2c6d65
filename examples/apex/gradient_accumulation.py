"""Gradient accumulation across iterations: four micro-batches per step, with and without ``delay_unscale``.

Plain blocks unscale each time, and may be clipped, counted and mixed as one likes. With ``delay_unscale=True`` in all but
the last the gradients stay scaled until then: less work, the same gradients. Run it with
``python examples/apex/gradient_accumulation.py``. With ``from apex import amp`` in the place of the import below,
``python -m mezzo.apex gradient_accumulation.py`` runs it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mezzo.apex import amp

MICRO = 4


def data() -> tuple[Tensor, Tensor]:
    """Make numbers to learn, always the same."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 32, generator=generator)
    return x, torch.tanh(x @ torch.randn(32, 4, generator=generator))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a net, always the same, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(opt_level: str, *, delay: bool) -> tuple[Tensor, float, int]:
    """Make 30 steps of four micro-batches each.

    Args:
        opt_level: A level.
        delay: Whether gradients stay scaled until the last micro-batch.

    Returns:
        All weights, the last loss, and what the scaler has counted.
    """
    model, optimizer = make()
    # A scale that does not overflow from the beginning, so that no step is skipped.
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, max_loss_scale=2.0**12, verbosity=0)
    x, y = data()
    for iteration in range(30 * MICRO):
        rows = slice(64 * (iteration % MICRO), 64 * (iteration % MICRO) + 64)
        loss = nn.functional.mse_loss(model(x[rows]), y[rows]) / MICRO
        last = iteration % MICRO == MICRO - 1
        with amp.scale_loss(loss, optimizer, delay_unscale=delay and not last) as scaled_loss:
            scaled_loss.backward()
        if last:
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)  # unscaled in either case
            optimizer.step()
            optimizer.zero_grad()
    weights = torch.cat([each.flatten() for each in model.state_dict().values()])
    return weights, loss.item(), amp.state_dict()["loss_scaler0"]["unskipped"]


def train_on_whole_batches() -> Tensor:
    """Make the same 30 steps in float32, without amp and micro-batches."""
    model, optimizer = make()
    x, y = data()
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def main() -> None:
    """Compare the two ways with whole batches in float32."""
    exact = train_on_whole_batches()
    for level in ("O1", "O2"):
        plain, _, _ = train(level, delay=False)
        for delay in (False, True):
            weights, loss, counted = train(level, delay=delay)
            off = ((weights - exact).norm() / exact.norm()).item()
            print(
                f"{level}, delay_unscale {delay!s:<5}: last loss {loss:.4f}, 30 steps, counted {counted} blocks; weights off"
                f" whole batches' by {off:.2%}, at most 1%: {off < 0.01}"
            )
        apart = ((weights - plain).norm() / plain.norm()).item()
        print(f"{level}: with and without delay_unscale are {apart:.1e} apart, at most 1e-5: {apart < 1e-5}")


if __name__ == "__main__":
    main()
