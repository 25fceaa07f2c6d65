"""Forcing particular layers/functions to a desired type: PyTorch's own functions, layers, and stretches of code at O1.

Registering one of PyTorch's functions overrules O1's lists, also where PyTorch calls it by itself. Registration comes
before ``amp.initialize``. Run it with ``python examples/apex/forced_dtypes.py``. With ``from apex import amp`` in the place
of the import below, ``python -m mezzo.apex forced_dtypes.py`` runs it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mezzo.apex import amp


class PreciseLinear(nn.Linear):
    """A layer that computes in float32 at O1."""

    @amp.float_function
    def forward(self, x: Tensor) -> Tensor:
        """Multiply in float32. The decorator casts the input; the block keeps linear from casting it again."""
        with amp.disable_casts():
            return super().forward(x)


class Net(nn.Module):
    """A net that looks at dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(32, 64), PreciseLinear(64, 64), nn.Linear(64, 8)
        self.seen: dict[str, torch.dtype] = {}

    def note(self, name: str, tensor: Tensor) -> Tensor:
        """Write a dtype down, and give the tensor on."""
        self.seen[name] = tensor.dtype
        return tensor

    def forward(self, x: Tensor) -> Tensor:
        """Give probabilities."""
        hidden = self.note("linear", self.body(x))
        hidden = self.note("einsum", torch.einsum("bi,bj->bi", hidden, hidden))
        self.note("exp", torch.exp(-hidden.abs()))
        with amp.disable_casts():
            self.note("@, casts disabled", x @ self.body.weight.t())
        hidden = self.note("PreciseLinear", self.middle(hidden))
        return self.note("sigmoid", torch.sigmoid(self.head(hidden)))


def run(*, low: bool) -> tuple[dict[str, torch.dtype], Tensor]:
    """Run a net.

    Args:
        low: At O1, or in float32.

    Returns:
        What the net saw, and its probabilities.
    """
    torch.manual_seed(0)
    model = amp.initialize(Net(), enabled=low, opt_level="O1", verbosity=0)
    return model.seen, model(torch.randn(64, 32))


def show(title: str, seen: dict[str, torch.dtype]) -> None:
    """Print what a net saw."""
    print(f"{title:<7} " + ", ".join(f"{name}: {str(dtype).removeprefix('torch.')}" for name, dtype in seen.items()))


def main() -> None:
    """Run in float32, and at O1 with functions registered."""
    target = torch.ones(64, 8)
    seen, exact = run(low=False)
    show("float32", seen)
    expected = nn.functional.binary_cross_entropy(exact, target)
    amp.register_half_function(torch, "exp")  # float32 in O1's lists
    amp.register_float_function(torch, "einsum")  # on no list: it would run in float16 here
    # binary_cross_entropy raises at O1 for probabilities in float16, which lose too much. So its input is to be float32.
    amp.register_float_function(torch, "sigmoid")
    seen, probabilities = run(low=True)
    show("O1", seen)
    off = abs(nn.functional.binary_cross_entropy(probabilities, target) - expected).item()
    print(f"binary cross entropy off float32's by {off:.1e}, at most 1e-3: {off < 1e-3}")


if __name__ == "__main__":
    main()
