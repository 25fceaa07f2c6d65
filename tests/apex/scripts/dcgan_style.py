"""Trains a generator against a discriminator: two models, two optimizers, three losses with a scale each."""

import argparse
import random

import torch
from torch import nn, optim

try:
    from apex import amp
except ImportError as error:
    raise SystemExit("this needs NVIDIA's apex") from error

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--nz", type=int, default=8)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--lr", type=float, default=0.0002)
parser.add_argument("--beta1", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=7)
parser.add_argument("--opt_level", default="O1")
opt = parser.parse_args()
print(opt)

random.seed(opt.seed)
torch.manual_seed(opt.seed)
device = torch.device("cpu")


def start_small(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        m.weight.data.normal_(0.0, 0.05)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(opt.nz, 16, 4, 1, 0, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, x):
        return self.main(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4, 1, 0, bias=False),
        )

    def forward(self, x):
        return self.main(x).view(-1, 1).squeeze(1)


net_g, net_d = Generator().to(device), Discriminator().to(device)
net_g.apply(start_small)
net_d.apply(start_small)
criterion = nn.BCEWithLogitsLoss()
optimizer_d = optim.Adam(net_d.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizer_g = optim.Adam(net_g.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

[net_d, net_g], [optimizer_d, optimizer_g] = amp.initialize(
    [net_d, net_g], [optimizer_d, optimizer_g], opt_level=opt.opt_level, num_losses=3
)

real_label, fake_label = 1.0, 0.0
for i in range(opt.steps):
    # The discriminator: real images, then made ones
    net_d.zero_grad()
    real = torch.randn(opt.batch_size, 1, 8, 8).abs().clamp(max=1).to(device)
    label = torch.full((opt.batch_size,), real_label, device=device)
    output = net_d(real)
    loss_real = criterion(output, label)
    with amp.scale_loss(loss_real, optimizer_d, loss_id=0) as scaled:
        scaled.backward()
    mean_real = output.mean().item()

    noise = torch.randn(opt.batch_size, opt.nz, 1, 1, device=device)
    fake = net_g(noise)
    label.fill_(fake_label)
    output = net_d(fake.detach())
    loss_fake = criterion(output, label)
    with amp.scale_loss(loss_fake, optimizer_d, loss_id=1) as scaled:
        scaled.backward()
    loss_d = loss_real + loss_fake
    optimizer_d.step()

    # The generator
    net_g.zero_grad()
    label.fill_(real_label)
    output = net_d(fake)
    loss_g = criterion(output, label)
    with amp.scale_loss(loss_g, optimizer_g, loss_id=2) as scaled:
        scaled.backward()
    optimizer_g.step()
    print(f"[{i}/{opt.steps}] Loss_D: {loss_d.item():.4f} Loss_G: {loss_g.item():.4f} D(x): {mean_real:.4f}")

print(list(amp.state_dict()))
