"""Multiple models/optimizers/losses: two models, two optimizers and three losses, with one scaler for all.

Each backward pass is told which optimizers own the parameters that it reaches: the third loss is of both models. Run it with
``python examples/apex/several_models.py --opt-level O2``. With ``from apex import amp`` in the place of the import below,
``python -m mezzo.apex several_models.py`` runs it.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from mezzo.apex import amp


def data() -> tuple[Tensor, Tensor]:
    """Make numbers to learn, always the same."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(128, 32, generator=generator)
    return x, torch.tanh(x @ torch.randn(32, 4, generator=generator))


def make() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Make two models, always the same, and an optimizer for each."""
    torch.manual_seed(0)
    models: list[nn.Module] = [nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)) for _ in range(2)]
    return models, [
        torch.optim.Adam(models[0].parameters(), lr=1e-3),
        torch.optim.SGD(models[1].parameters(), lr=0.05),
    ]


def losses(models: list[nn.Module], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a loss of each model, and one of both, by which they come to agree."""
    first, second = models[0](x), models[1](x)
    criterion = nn.functional.mse_loss
    return criterion(first, y), criterion(second, y), criterion(first, second)


def train(opt_level: str) -> tuple[list[float], list[int], list[Tensor]]:
    """Train for 60 iterations.

    Args:
        opt_level: A level.

    Returns:
        The last losses, the number of steps that each optimizer made, and all weights in float32.
    """
    models, optimizers = make()
    models, optimizers = amp.initialize(models, optimizers, opt_level=opt_level, loss_scale="dynamic", verbosity=0)
    # Optimizers pass over parameters without gradients, so a skipped step shows in what they have moved.
    made = [0, 0]
    x, y = data()
    for _ in range(60):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss0, loss1, loss2 = losses(models, x, y)
        with amp.scale_loss(loss0, optimizers[0]) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
        with amp.scale_loss(loss1, optimizers[1]) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
        with amp.scale_loss(loss2, optimizers) as scaled_loss:  # both: it adds to the gradients of either model
            scaled_loss.backward()
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            before = model[0].weight.detach().clone()
            optimizer.step()
            made[index] += not torch.equal(before, model[0].weight)
    last = [loss.item() for loss in losses(models, x, y)]
    return last, made, [each for model in models for each in model.state_dict().values()]


def main() -> None:
    """Train in float32 and at a level."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--opt-level", default="O2")
    opt_level = parser.parse_args().opt_level
    expected, _, exact = train("O0")
    print("O0: losses " + ", ".join(f"{loss:.4f}" for loss in expected))
    found, made, weights = train(opt_level)
    off = max(((one - other).norm() / other.norm()).item() for one, other in zip(weights, exact, strict=True))
    print(
        f"{opt_level}: losses "
        + ", ".join(f"{loss:.4f}" for loss in found)
        + f"; steps made {made[0]} and {made[1]} of 60,"
        f" scale {amp.state_dict()['loss_scaler0']['loss_scale']:.0f}; weights off by at most {off:.1%},"
        f" at most 5%: {off < 0.05}"
    )


if __name__ == "__main__":
    main()
