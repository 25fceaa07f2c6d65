"""Prepare a model for inference: half the memory, no casts of weights, and the numbers of autocast.

Run it with ``python examples/torch_prepare_inference.py``; it takes a few seconds.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from mezzo.torch import autocast, memory_report, prepare, unprepare


def make_model() -> nn.Module:
    """Make a small transformer, always the same."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
    return model.append(nn.Linear(256, 1000)).eval()


@torch.no_grad()
def predict(model: nn.Module, tokens: Tensor) -> Tensor:
    """Run a model under autocast: prepared or not, the call is the same."""
    with autocast("cpu", dtype=torch.bfloat16):
        return model(tokens)


def milliseconds(models: list[nn.Module], tokens: Tensor) -> list[float]:
    """Give the time of the fastest of some calls of each model, which take turns."""
    times: list[list[float]] = [[] for _ in models]
    for _ in range(20):
        for model, its in zip(models, times, strict=True):
            start = time.perf_counter()
            predict(model, tokens)
            its.append(time.perf_counter() - start)
    return [1000 * min(its) for its in times]


def main() -> None:
    """Compare a model as it is with the same, prepared."""
    plain, model = make_model(), make_model()
    tokens = torch.randint(1000, (1, 16), generator=torch.Generator().manual_seed(0))
    prepare(model, dtype=torch.bfloat16)  # no optimizer, no masters
    output = predict(model, tokens)
    print(f"output {output.dtype}, equal to autocast's: {torch.equal(output, predict(plain, tokens))}")
    before, after = milliseconds([plain, model], tokens)
    print(f"{before:.1f} ms under autocast, {after:.1f} ms prepared")

    report = memory_report(model)
    print(f"{report.before.parameters:,} bytes of parameters, now {report.after.parameters:,}")
    print(f"{len(report.stored)} parameters in bfloat16, {len(report.kept)} kept; reasons to keep:")
    for reason in dict.fromkeys(report.kept.values()):
        print(f"  {reason}")

    # More memory can be saved where you know that it does no harm: the embedding is only looked up.
    unprepare(model)
    prepare(model, dtype=torch.bfloat16, low=nn.Embedding)
    print(f"with the embedding: {memory_report(model).after.parameters:,} bytes, {predict(model, tokens).dtype}")


if __name__ == "__main__":
    main()
