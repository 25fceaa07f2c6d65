"""Custom data batch types: a class of batches whose method ``to(dtype)`` says how it is cast, at O2 and O3.

At the levels that cast the model, what the model is called with is cast too: tensors, and tensors in lists, tuples, mappings
and dataclasses registered with PyTorch. Another class is asked: its method ``to`` is called with the dtype. Run it with
``python examples/apex/custom_batches.py``. With ``from apex import amp`` in the place of the import below,
``python -m mezzo.apex custom_batches.py`` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mezzo.apex import amp


@dataclass
class Sentences:
    """A batch: embedded words, which of them count, and how long sentences are."""

    words: Tensor
    mask: Tensor
    lengths: Tensor

    def to(self, *args: Any, **kwargs: Any) -> Sentences:
        """Give a batch in another dtype (amp calls ``to(dtype)``), or on another device.

        It returns the new batch. Lengths are integers and stay so; mask is multiplied by words, and goes with them.
        """
        dtype_free = {name: value for name, value in kwargs.items() if name != "dtype"}
        places = [each for each in args if not isinstance(each, torch.dtype)]
        lengths = self.lengths.to(*places, **dtype_free) if places or dtype_free else self.lengths
        return replace(self, words=self.words.to(*args, **kwargs), mask=self.mask.to(*args, **kwargs), lengths=lengths)


class Output(NamedTuple):
    """What the model returns; a named tuple stays one."""

    scores: Tensor
    lengths: Tensor


class Reader(nn.Module):
    """Takes the mean of the words of a sentence, and scores it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 4)
        self.seen = ""

    def forward(self, batch: Sentences, bias: dict[str, Tensor]) -> Output:
        """Score sentences."""
        self.seen = ", ".join(
            f"{name} {str(each.dtype).removeprefix('torch.')}"
            for name, each in {**vars(batch), "bias": bias["bias"]}.items()
        )
        means = (batch.words * batch.mask.unsqueeze(-1)).sum(1) / batch.lengths.unsqueeze(-1)
        return Output(self.layer(means) + bias["bias"], batch.lengths)


def batch_of_sentences() -> Sentences:
    """Make a batch in float32, as a DataLoader would give it."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 9, (16,), generator=generator)
    mask = (torch.arange(8) < lengths.unsqueeze(-1)).float()
    return Sentences(torch.randn(16, 8, 32, generator=generator), mask, lengths)


def main() -> None:
    """Call a model with such a batch at each level."""
    exact: Tensor | None = None
    for level in ("O0", "O2", "O3"):
        torch.manual_seed(0)
        model = Reader()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        output = model(batch_of_sentences(), bias={"bias": torch.zeros(4)})
        with amp.scale_loss(output.scores.square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        exact = output.scores if exact is None else exact
        off = ((output.scores - exact).norm() / exact.norm()).item()
        print(
            f"{level}: the model sees {model.seen}; gives {type(output).__name__} with scores {output.scores.dtype}, lengths"
            f" {output.lengths.dtype}; off by {off:.2%}, at most 1%: {off < 0.01}"
        )


if __name__ == "__main__":
    main()
