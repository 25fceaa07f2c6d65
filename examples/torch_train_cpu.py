"""Train on a CPU in bfloat16 or float16: PyTorch's own loop, with mezzo's region in it.

Run it with ``python examples/torch_train_cpu.py``; it takes a few seconds.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mezzo.torch import autocast


def digits() -> tuple[Tensor, Tensor]:
    """Load 1797 handwritten digits, 8x8 pixels, shuffled."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return images[order], torch.tensor(labels)[order]


def make_net() -> nn.Module:
    """Make a small convolution net."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def train(dtype: torch.dtype | None, policy: str | None = None) -> tuple[float, float]:
    """Train for two epochs.

    Args:
        dtype: The region's dtype; None for plain float32.
        policy: The region's policy.

    Returns:
        The last loss and the accuracy on the digits that were held out.
    """
    images, labels = digits()
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    # float16 gradients underflow; PyTorch's scaler keeps them in range. In other dtypes it is switched off.
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    for _ in range(2):
        for start in range(0, 1500, 50):
            optimizer.zero_grad()
            # The region holds the forward pass and the loss; backward follows by itself.
            with autocast("cpu", dtype=dtype, enabled=dtype is not None, policy=policy):
                output = net(images[start : start + 50])
                loss = nn.functional.cross_entropy(output, labels[start : start + 50])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    with torch.no_grad():
        right = net.eval()(images[1500:]).argmax(-1) == labels[1500:]
    return loss.item(), right.float().mean().item()


def main() -> None:
    """Train in three precisions and two policies, and compare."""
    print(f"{'dtype':<10} {'policy':<10} {'last loss':>9} {'accuracy':>9}")
    for dtype, policy in (
        (None, None),
        (torch.bfloat16, None),
        (torch.bfloat16, "unified"),
        (torch.float16, None),
        (torch.float16, "unified"),
    ):
        loss, accuracy = train(dtype, policy)
        name = "float32" if dtype is None else str(dtype).removeprefix("torch.")
        print(f"{name:<10} {policy or '-':<10} {loss:>9.4f} {accuracy:>9.1%}")


if __name__ == "__main__":
    main()
