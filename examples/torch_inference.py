"""Run a model in low precision without training it: in a region, by a decorator on ``forward``, and traced.

Run it with ``python examples/torch_inference.py``; it takes a few seconds.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from mezzo.torch import autocast, observe


class Classifier(nn.Module):
    """A transformer layer with a linear head, whose ``forward`` brings its region along."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.head = nn.Linear(64, 10)

    @autocast("cpu", dtype=torch.bfloat16, policy="unified")
    def forward(self, tokens: Tensor) -> Tensor:
        """Give the probabilities of ten classes."""
        return self.head(self.layer(tokens).mean(1)).softmax(-1)


def in_a_region(model: nn.Module, tokens: Tensor) -> None:
    """The page's inference loop, watched."""
    with torch.no_grad(), observe("cpu") as seen, autocast("cpu", dtype=torch.bfloat16):
        hidden = model(tokens)
    print(f"region:    output {hidden.dtype}, {len(seen.calls)} listed ops ran, {seen.casts} casts")
    for call in seen.calls:
        print(f"           {call.op:<22} {', '.join(call.input_dtypes)} -> {call.output_dtype}")


def by_decorator(tokens: Tensor) -> None:
    """The decorated model in full and in low precision."""
    torch.manual_seed(0)
    model = Classifier().eval()
    with torch.no_grad():
        low = model(tokens)
        full = Classifier.forward.__wrapped__(model, tokens)
    print(f"decorator: output {low.dtype}, off by at most {(low - full).abs().max():.1e} from float32")


def traced(model: nn.Module, tokens: Tensor) -> None:
    """Trace with the cache off, as PyTorch's page does; the casts become part of the graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, and still in use
        with torch.no_grad(), autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            graph = torch.jit.freeze(torch.jit.trace(model.eval(), tokens))
            outputs = [graph(tokens) for _ in range(3)]
            same = all(torch.equal(output, model(tokens)) for output in outputs)
    print(f"traced:    output {outputs[-1].dtype}, three runs equal to eager: {same}")


def main() -> None:
    """Show all three."""
    torch.manual_seed(0)
    tokens = torch.randn(8, 16, 64)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval()
    in_a_region(net, tokens)
    by_decorator(tokens)
    traced(net, tokens)


if __name__ == "__main__":
    main()
