"""Small nets that are trained on the stand-in and, by the same rules, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mezzo.torch import autocast

D = "standin"
KEEP_4_OF_5 = 0.2
"""Chance of dropout. The CPU rounds 1 / (1 - chance) to the tensor's dtype, and the op that PyTorch has for accelerators
does not; 1.25 needs no rounding."""


def same(there: Tensor, here: Tensor) -> bool:
    """Compare numbers and dtype of a tensor on the device with one on the CPU, exactly."""
    assert (there.device.type, here.device.type) == (D, "cpu")
    return there.dtype is here.dtype and torch.equal(there.detach().cpu(), here.detach())


class Block(nn.Module):
    """A transformer block with dropout, and a classifier on the mean of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.attention = nn.MultiheadAttention(16, 2, dropout=KEEP_4_OF_5, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(KEEP_4_OF_5), nn.Linear(32, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head((x + self.feed(self.norms[1](x))).mean(1))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(KEEP_4_OF_5), nn.Linear(32, 5))


def conv() -> nn.Module:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*layers, nn.Conv2d(4, 6, 2), nn.Flatten(), nn.Linear(24, 5))


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), Mean(), nn.Linear(8, 5))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(16, 12)),
    "conv": (conv, lambda: torch.randn(16, 1, 8, 8)),
    "block": (Block, lambda: torch.randn(16, 4, 16)),
    "words": (words, lambda: torch.randint(0, 11, (16, 6))),
}
"""Name to what makes the net, and what makes a batch for it."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "mlp": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "conv": lambda params: torch.optim.Adam(params, lr=0.01, foreach=True),
    "block": lambda params: torch.optim.AdamW(params, lr=0.01),
    "words": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}

Region = Callable[[], AbstractContextManager[Any]]


@dataclass
class Result:
    """What a run left behind."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    weights: list[list[Tensor]] = field(default_factory=list)
    """Parameters and buffers after each step, on the CPU."""

    def equals(self, other: Result) -> bool:
        """Say whether two runs went the same way, to the last bit."""
        pairs = zip(self.weights, other.weights, strict=True)
        weights = all(all(map(torch.equal, mine, theirs)) for mine, theirs in pairs)
        return (self.losses, self.scales) == (other.losses, other.scales) and weights


def train(
    name: str,
    device: str,
    region: Region = nullcontext,
    scaler: Any = None,
    *,
    steps: int = 6,
    broken: Sequence[int] = (),
    clip: float | None = None,
) -> Result:
    """Train one of the nets for some steps.

    Args:
        name: Which.
        device: Where.
        region: Makes the autocast region of a forward pass.
        scaler: A gradient scaler, or None.
        steps: How many.
        broken: The steps whose gradients get an Inf.
        clip: The norm to which gradients are clipped, if given.

    Returns:
        The losses, scales and weights.
    """
    make, batch = NETS[name]
    torch.manual_seed(0)
    net = make().to(device)
    inputs, labels = batch().to(device), torch.randint(0, 5, (16,)).to(device)
    optimizer = OPTIMIZERS[name](net.parameters())
    scaler = scaler or torch.amp.GradScaler(device, enabled=False)
    result = Result()
    torch.manual_seed(1)  # from here on, and on the CPU too, random numbers are drawn for dropout alone
    for step in range(steps):
        optimizer.zero_grad()
        # On the CPU attention is one fused op, on a new accelerator it is several; the latter can be had on both.
        with region(), sdpa_kernel(SDPBackend.MATH):
            loss = F.cross_entropy(net(inputs), labels)
        scaler.scale(loss).backward()
        if step in broken:
            next(net.parameters()).grad.view(-1)[1] = float("inf")
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        result.losses.append(loss.item())
        result.scales.append(scaler.get_scale())
        result.weights.append([one.detach().cpu().clone() for one in (*net.parameters(), *net.buffers())])
    return result


def by_the_same_rules(dtype: torch.dtype) -> Region:
    """Make regions of the CPU that follow the table which the stand-in follows."""
    return lambda: autocast("cpu", dtype, policy="reference")
