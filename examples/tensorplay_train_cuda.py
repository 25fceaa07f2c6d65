"""Typical mixed precision training on CUDA; where there is none, the same loop on the CPU.

Run it with ``python examples/tensorplay_train_cuda.py``; it takes a second.
"""

from __future__ import annotations

import tensorplay
from tensorplay import nn, optim

from mezzo.tensorplay import autocast

DEVICE = "cuda" if tensorplay.cuda.is_available() else "cpu"


def main() -> None:
    """Train, with the forward pass and the loss in a region, the backward pass outside."""
    if DEVICE == "cpu":
        print("needs CUDA, which TensorPlay has not here: the same loop on the CPU")
    tensorplay.manual_seed(0)
    # Creates model and optimizer in default precision
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 1)).to(DEVICE)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    loss_fn = nn.MSELoss()
    inputs = tensorplay.randn(512, 16)
    targets = inputs.sum(-1, keepdim=True) / 4
    data = [(inputs[at : at + 64].to(DEVICE), targets[at : at + 64].to(DEVICE)) for at in range(0, 512, 64)]

    losses = []
    for _ in range(10):
        for batch, target in data:
            optimizer.zero_grad()

            # Enables autocasting for the forward pass (model + loss)
            with autocast(device_type=DEVICE):
                output = model(batch)
                loss = loss_fn(output, target)

            # Exits the context manager before backward()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    weight = model[0].weight
    print(f"{DEVICE}: output {output.dtype}, loss {loss.dtype}, weight {weight.dtype}, gradient {weight.grad.dtype}")
    print(f"loss {losses[0]:.1f} -> {losses[-1]:.1f}, at most a tenth: {losses[-1] < losses[0] / 10}")


if __name__ == "__main__":
    main()
