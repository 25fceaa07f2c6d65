"""Faults that people have, each planted in one place of the transformer, and what a report has to say of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import transformer
from .transformer import WIDTH, Attention, Mlp, Transformer

FLOAT16 = torch.float16
BOTH = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Fault:
    """A fault, and where it is.

    Attributes:
        name: What it is.
        plant: Puts it into a sound model.
        module: The module it is in.
        op: The first op that is not right.
        phase: ``"forward"`` or ``"backward"``.
        kind: What that op gives: ``"Inf"``, ``"-Inf"`` or ``"NaN"``.
        dtypes: The dtypes in which it happens.
        scale: What the loss is multiplied by.
        dtype: The dtype of what is not finite; empty for the region's.
    """

    name: str
    plant: Callable[[Transformer], None]
    module: str
    op: str
    phase: str
    kind: str
    dtypes: tuple[torch.dtype, ...] = BOTH
    scale: float = 1024.0
    dtype: str = ""

    @property
    def place(self) -> str:
        """Give the line that is marked with its name: here, or among the sound parts of the model."""
        for path in (Path(__file__), Path(transformer.__file__)):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                if line.endswith(f"# fault: {self.name}"):
                    return f"{path.parent.name}/{path.name}:{number}"
        msg = f"no line is marked '# fault: {self.name}'"
        raise LookupError(msg)


class LoudAttention(Attention):
    """Queries and keys have grown so far that their product is beyond 65504."""

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        scores = (500 * query) @ (500 * key).transpose(-2, -1)  # fault: attention logits
        return scores.softmax(-1)


def loud_attention(model: Transformer) -> None:
    model.layers[3].attn = LoudAttention()


class FullyMaskedAttention(Attention):
    """Each token may look at those before it, and not at itself: the first one has nothing to look at."""

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.transpose(-2, -1) / math.sqrt(WIDTH)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(0)
        return scores.masked_fill(hidden, -math.inf).softmax(-1)  # fault: row masked wholly


def masked_attention(model: Transformer) -> None:
    model.layers[1].attn = FullyMaskedAttention()


class SquaredRelu(nn.Module):
    """The square of what is above 256 is beyond 65504."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.relu() * 2000).pow(2) * 1e-9  # fault: squared activation


def squared_relu(model: Transformer) -> None:
    model.layers[2].mlp.act = SquaredRelu()


class RootNorm(nn.Module):
    """1e-8 is 0 in float16, and the padding's embedding is 0 too."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8)  # fault: eps of a norm


def norm_without_eps(model: Transformer) -> None:
    model.layers[0].attn_norm = RootNorm()


class Gate(nn.Module):
    """Scales what it lets through by how undecided it is. When it is sure, a probability is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        chances = (500 * self.score(x)).softmax(-1)
        undecided = -(chances * chances.log()).sum(-1, keepdim=True)  # fault: log of zero
        return x * undecided


def sure_gate(model: Transformer) -> None:
    torch.manual_seed(1)
    model.layers[5].mlp = nn.Sequential(Gate(), Mlp())


class MeanOfValid(nn.Module):
    """The mean over those tokens that count, of which a batch may have none."""

    def forward(self, x: Tensor) -> Tensor:
        valid = (x.amax(-1, keepdim=True) > 1e4).to(x.dtype)
        mean = (x * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True)  # fault: mean of nothing
        return x - mean


def mean_of_nothing(model: Transformer) -> None:
    model.layers[4].mlp = nn.Sequential(MeanOfValid(), Mlp())


def broken_weight(model: Transformer) -> None:
    """An earlier step has written a NaN into a weight."""
    with torch.no_grad():
        model.layers[2].attn.out.weight[3, 5] = math.nan


class LengthNorm(nn.Module):
    """The length of a vector of zeros is 0, where the root has no derivative; each third token was dropped."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * (torch.arange(x.shape[1]) % 3 > 0).unsqueeze(-1)
        length = x.pow(2).sum(-1, keepdim=True).sqrt()  # fault: root of zero
        return x / (length + 1e-2)


def root_of_zero(model: Transformer) -> None:
    model.layers[4].mlp_norm = LengthNorm()


class PowerRelu(nn.Module):
    """A power below 1 has no derivative at 0, and what was set to 0 by a mask gives 0 times Inf."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * (x > 0)) ** 0.7  # fault: power below one


def power_relu(model: Transformer) -> None:
    model.layers[5].mlp.act = PowerRelu()


class Boost(torch.autograd.Function):
    """Passes a tensor on, and makes its gradient larger."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3e38  # fault: boosted gradient


class Boosted(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return Boost.apply(super().forward(x))


def boosted_gradient(model: Transformer) -> None:
    model.layers[4].mlp.act = Boosted()


class HeavyMlp(Mlp):
    """Small activations times large weights are fine on the way forward; gradients meet the large weights alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)) * 1e-4)  # fault: heavy weights


def heavy_weights(model: Transformer) -> None:
    mlp = HeavyMlp()
    with torch.no_grad():
        mlp.down.weight.uniform_(-6e4, 6e4)
    model.layers[1].mlp = mlp


def nothing(model: Transformer) -> None:
    """The model is sound; the scale is not."""


FAULTS = (
    Fault("attention logits", loud_attention, "layers.3.attn", "aten::matmul", "forward", "Inf", (FLOAT16,)),
    Fault("row masked wholly", masked_attention, "layers.1.attn", "aten::_softmax", "forward", "NaN"),
    Fault("squared activation", squared_relu, "layers.2.mlp.act", "aten::pow", "forward", "Inf", (FLOAT16,)),
    Fault("eps of a norm", norm_without_eps, "layers.0.attn_norm", "aten::rsqrt", "forward", "Inf", (FLOAT16,)),
    Fault("log of zero", sure_gate, "layers.5.mlp.0", "aten::log", "forward", "-Inf"),
    Fault("mean of nothing", mean_of_nothing, "layers.4.mlp.0", "aten::div", "forward", "NaN"),
    Fault("broken weight", broken_weight, "layers.2.attn.out", "aten::linear", "forward", "NaN", dtype="float32"),
    Fault("root of zero", root_of_zero, "layers.4.mlp_norm", "aten::div", "backward", "NaN"),
    Fault("power below one", power_relu, "layers.5.mlp.act", "aten::pow", "backward", "Inf"),
    Fault("boosted gradient", boosted_gradient, "layers.4.mlp.act", "aten::mul", "backward", "Inf"),
    Fault("heavy weights", heavy_weights, "layers.1.mlp.down", "aten::mm", "backward", "Inf", (FLOAT16,)),
    Fault("scale too large", nothing, "loss", "aten::_to_copy", "backward", "Inf", (FLOAT16,), scale=2.0**26),
)
