"""Optionally have Amp use a different loss scaler per-loss: ``num_losses`` and ``loss_id``.

A large loss and a small one over one body. One scale cannot serve both: where the large loss's gradients fit into float16,
most of the small one's are below its smallest number. With a scaler for each, both come through, and are added up unscaled.
Run it with ``python examples/apex/scaler_per_loss.py``. With ``from apex import amp`` in the place of the import below,
``python -m mezzo.apex scaler_per_loss.py`` runs it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mezzo.apex import amp

LARGE, SMALL = 1e2, 1e-9


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


def gradients(opt_level: str, num_losses: int) -> tuple[dict[str, Tensor], list[float]]:
    """Let the scales find their sizes in 50 iterations, and give the gradients of the last one.

    Args:
        opt_level: A level.
        num_losses: How many scalers: one for both losses, or two.

    Returns:
        The gradient of each head's weight, and the scales.
    """
    torch.manual_seed(0)
    net = TwoHeads()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)  # the weights stay, so that gradients can be compared
    net, optimizer = amp.initialize(
        net,
        optimizer,
        opt_level=opt_level,
        num_losses=num_losses,
        loss_scale="dynamic",
        verbosity=0,
        max_loss_scale=2.0**40,
    )
    if num_losses == 2:
        # As scripts do: begin with the scale that it had in earlier runs. From 2**16 it is doubled every 2000 blocks.
        amp._amp_state.loss_scalers[1]._loss_scale = 2.0**36  # noqa: SLF001 - Apex has no other way
    x = torch.randn(64, 32)
    y = torch.tanh(x.sum(1, keepdim=True))
    for _ in range(50):
        optimizer.zero_grad()
        large, small = net(x)
        losses = LARGE * nn.functional.mse_loss(large, y), SMALL * nn.functional.mse_loss(small, -y)
        for index, loss in enumerate(losses):
            # loss_id names the scaler; it is halved when this loss overflows, and the other stays.
            with amp.scale_loss(loss, optimizer, loss_id=index % num_losses) as scaled_loss:
                scaled_loss.backward(retain_graph=index == 0)
        optimizer.step()
    heads = {"large": net.large.weight.grad.float(), "small": net.small.weight.grad.float()}
    return heads, [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]  # noqa: SLF001 - as above


def main() -> None:
    """Compare gradients with float32's."""
    exact, _ = gradients("O0", 1)
    for level in ("O1", "O2"):
        for count in (1, 2):
            found, scales = gradients(level, count)
            off = {name: ((found[name] - value).norm() / value.norm()).item() for name, value in exact.items()}
            shown = " and ".join(f"2**{math.log2(scale):.0f}" for scale in scales)
            print(
                f"{level}, {count} scaler{'s' * (count - 1)}: scale {shown}; gradients off float32's by {off['large']:.2%}"
                f" (large loss), {off['small']:.2%} (small); both at most 1%: {max(off.values()) < 0.01}"
            )


if __name__ == "__main__":
    main()
