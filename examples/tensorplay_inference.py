"""Inference on the CPU: in a region, and as the page exports a model, with the cache off.

Run it with ``python examples/tensorplay_inference.py``; it takes a second.
"""

from __future__ import annotations

from typing import Any

import tensorplay
from tensorplay import nn

import mezzo.tensorplay
from mezzo.tensorplay import autocast


class TestModel(nn.Module):
    """One layer."""

    def __init__(self, input_size: int, num_classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(input_size, num_classes)

    def forward(self, x: Any) -> Any:
        """Give the logits."""
        return self.fc1(x)


def in_a_region() -> None:
    """The page's inference loop."""
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4)).eval()
    data = [tensorplay.randn(8, 16) for _ in range(3)]
    exact = [model(batch) for batch in data]
    with tensorplay.no_grad(), autocast(device_type="cpu", dtype=tensorplay.bfloat16):
        outputs = [model(batch) for batch in data]
    # Digits of bfloat16: each number is rounded by at most 1/256 of itself, in four layers.
    off = max((output.float() - wide).abs().max().item() for output, wide in zip(outputs, exact, strict=True))
    print(f"region: output {outputs[-1].dtype}, within 0.03 of float32: {off < 0.03}")


def exported() -> None:
    """The page's export: TensorPlay 1.0 has no ``jit``, so the model is run as it is in place of the graph."""
    input_size, num_classes = 2, 2
    model = TestModel(input_size, num_classes).eval()
    if not hasattr(tensorplay, "jit"):
        print("TensorPlay has no tensorplay.jit: nothing is traced or frozen, the model runs in the region itself")
    # No cast of a weight outlives its use.
    with tensorplay.no_grad(), mezzo.tensorplay.cpu.amp.autocast(cache_enabled=False):
        # Models Run
        for _ in range(3):
            output = model(tensorplay.randn(1, input_size))
    print(f"cpu.amp.autocast(cache_enabled=False): three runs, output {output.dtype}, {tuple(output.shape)}")


def main() -> None:
    """Show both."""
    tensorplay.manual_seed(0)
    in_a_region()
    exported()


if __name__ == "__main__":
    main()
