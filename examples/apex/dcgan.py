"""GANs: two models, two optimizers and three losses, each with a scaler of its own (DCGAN's shape, on small digits).

The discriminator has two losses, one for real and one for generated images, and the generator one. Run it with
``python examples/apex/dcgan.py --opt-level O1``; it takes some seconds. With ``from apex import amp`` in the place of the
import below, ``python -m mezzo.apex dcgan.py`` runs it.
"""

from __future__ import annotations

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mezzo.apex import amp

NOISE, BATCH, ITERATIONS = 16, 32, 60


def digits() -> Tensor:
    """Load handwritten digits, 8x8 pixels from -1 to 1."""
    images = torch.tensor(load_digits().images / 8 - 1, dtype=torch.float32)
    return images.unsqueeze(1)


def generator() -> nn.Module:
    """Make images of noise."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 32, 2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def discriminator() -> nn.Module:
    """Tell real images from others. It gives logits: a sigmoid and BCELoss lose too much in float16."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 2),
        nn.Flatten(0),
    )


def main() -> None:
    """Train both, and look at scales, steps and images."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--opt-level", default="O1")
    opt_level = parser.parse_args().opt_level
    torch.manual_seed(0)
    real_images = digits()
    net_d, net_g = discriminator(), generator()
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    [net_d, net_g], [optimizer_d, optimizer_g] = amp.initialize(
        [net_d, net_g], [optimizer_d, optimizer_g], opt_level=opt_level, num_losses=3, verbosity=0
    )
    criterion = nn.BCEWithLogitsLoss()
    noise = torch.randn(BATCH, NOISE, 1, 1)
    before = (net_g(noise).mean(0) - real_images.mean(0)).abs().mean().item()
    losses: list[tuple[float, float, float]] = []
    for iteration in range(ITERATIONS):
        first = iteration * BATCH % (len(real_images) - BATCH)
        real = real_images[first : first + BATCH]
        ones, zeros = torch.ones(BATCH), torch.zeros(BATCH)

        optimizer_d.zero_grad()
        loss_real = criterion(net_d(real), ones)
        with amp.scale_loss(loss_real, optimizer_d, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        fake = net_g(torch.randn(BATCH, NOISE, 1, 1))
        loss_fake = criterion(net_d(fake.detach()), zeros)
        with amp.scale_loss(loss_fake, optimizer_d, loss_id=1) as scaled_loss:
            scaled_loss.backward()  # adds to the gradients of the first, which are unscaled already
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = criterion(net_d(fake), ones)
        with amp.scale_loss(loss_g, optimizer_g, loss_id=2) as scaled_loss:
            scaled_loss.backward()
        optimizer_g.step()
        losses.append((loss_real.item(), loss_fake.item(), loss_g.item()))

    after = (net_g(noise).mean(0) - real_images.mean(0)).abs().mean().item()
    scales = [entry["loss_scale"] for entry in amp.state_dict().values()]
    finite = all(math.isfinite(loss) for each in losses for loss in each)
    print(
        f"{opt_level}: last losses " + ", ".join(f"{loss:.3f}" for loss in losses[-1]) + f"; all were finite: {finite}"
    )
    print(f"scales of the three losses: {', '.join(f'{scale:.0f}' for scale in scales)}")
    print(
        f"the mean generated image is off the mean digit by {before:.3f} at first, {after:.3f} at the end;"
        f" nearer: {after < before}"
    )


if __name__ == "__main__":
    main()
