"""How often weights are cast, counted by PyTorch's profiler: from outside, whoever makes the casts and keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

LOW = (torch.bfloat16, torch.float16)


@dataclass
class Casts:
    """The casts that a block has made of some weights.

    Attributes:
        count: How many; -1 until the block is left.
    """

    count: int = -1


@contextmanager
def counted_casts(*weights: Tensor) -> Iterator[Casts]:
    """Count the casts of weights in a block, by their shapes: nothing else that is cast there may have one of these.

    Args:
        weights: The weights.

    Yields:
        What holds the count once the block is left.
    """
    casts = Casts()
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        yield casts
    casts.count = _count(profile.function_events, {tuple(weight.shape) for weight in weights})


def _count(events: Iterable[torch.autograd.profiler_util.FunctionEvent], shapes: set[tuple[int, ...]]) -> int:
    made = [event for event in events if event.name == "aten::_to_copy"]
    return sum(tuple(event.input_shapes[0]) in shapes for event in made)
