"""PyTorch's fused optimizer steps on a CPU, in blocks that stay in the cache.

A block's gradients are converted to float32 into a buffer that is used again for the next one, PyTorch's own kernel steps
the block, and the result is rounded to the model while it is still in the cache. Masters that have no values between steps
get theirs in such a buffer too, so there is never a float32 copy of a whole parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .rounding import generator_for, round_nearest_, round_stochastic_, split_, widen_

if TYPE_CHECKING:
    from .settings import Owner
    from .single_pass import Flat

__all__ = ["Numbers", "number", "update_"]

BLOCK = 2**18
"""How many elements a thread works on at a time; a multiple of the 16 by which PyTorch's kernels divide their work.

With 2**15 of them the calls cost a fifth of what is saved, with 2**22 their memory leaves the cache; in between it makes
little difference, and fewer blocks are fewer times at which threads wait for each other.
"""
_MOST_THREADS = 16


class Numbers:
    """The random numbers of one step's stochastic rounding.

    Masters of one owner draw from one stream, in the order in which they are stepped: what `round_stochastic_` would draw
    for the whole list.
    """

    def __init__(self) -> None:
        self._streams: dict[int, tuple[Owner, torch.Generator]] = {}

    def of(self, owner: Owner) -> torch.Generator | None:
        """Give the stream of an owner; None if it rounds to nearest."""
        settings = owner.settings
        if not settings.rounds_at_random:
            return None
        if id(owner) not in self._streams:
            self._streams[id(owner)] = owner, generator_for(torch.device("cpu"), settings.seed, owner.rounds)
        return self._streams[id(owner)][1]

    def close(self) -> None:
        """Count the step for the owners that have drawn."""
        for owner, _ in self._streams.values():
            owner.rounds += 1
        self._streams.clear()


class _Job(NamedTuple):
    """A parameter with what its step needs."""

    flat: Flat
    kept: Sequence[Tensor]
    step: Tensor | None


class _Piece(NamedTuple):
    """Up to a block of one parameter, as 1-D views."""

    gradient: Tensor
    wide: Tensor
    low: Tensor
    compensation: Tensor | None
    kept: tuple[Tensor, ...]
    step: Tensor | None


Kernel = Callable[[list[Tensor], list[Tensor], list[_Piece]], None]
"""Steps float32 parameters by float32 gradients."""


def update_(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], flat: list[Flat], scale: Tensor | None, numbers: Numbers
) -> None:
    """Step masters and round them to the model; see `mezzo.torch.masters.single_pass.update_`.

    Args:
        optimizer: An Adam, AdamW or SGD.
        group: Its group, with ``fused=True``.
        flat: Masters of the group, on a CPU; Adam's have their state.
        scale: What to divide gradients by; float32, of one element, on the CPU.
        numbers: Of the step, for masters that are rounded stochastically.
    """
    if type(optimizer) is torch.optim.SGD:
        _update_sgd(optimizer, group, flat, scale, numbers)
    else:
        _update_adam(optimizer, group, flat, scale, numbers)


def number(value: float | Tensor) -> float:
    """Give a hyperparameter, which may be a tensor, as a number."""
    return float(value.item()) if isinstance(value, Tensor) else value


def _update_adam(
    optimizer: Any, group: dict[str, Any], flat: list[Flat], scale: Tensor | None, numbers: Numbers
) -> None:
    beta1, beta2 = map(number, group["betas"])
    options: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "grad_scale": scale}
    options.update((name, number(group[name])) for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize"))
    op = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 2 + bool(group["amsgrad"])]

    def kernel(wide: list[Tensor], gradients: list[Tensor], pieces: list[_Piece]) -> None:
        kept = [[piece.kept[place] for piece in pieces] for place in range(len(names))]
        means, squares, largest = [*kept, []][:3]
        steps = [piece.step for piece in pieces if piece.step is not None]
        op(wide, gradients, means, squares, largest, steps, **options)

    states = [optimizer.state[each.master] for each in flat]
    # Once per step: the kernel reads it for every block.
    torch._foreach_add_([state["step"] for state in states], 1)
    kept = [[state[name] for name in names] for state in states]
    _run(list(map(_Job, flat, kept, [state["step"] for state in states])), kernel, numbers)


def _update_sgd(
    optimizer: Any, group: dict[str, Any], flat: list[Flat], scale: Tensor | None, numbers: Numbers
) -> None:
    momentum = group["momentum"]
    options: dict[str, Any] = {name: number(group[name]) for name in ("lr", "momentum", "weight_decay", "dampening")}
    options.update(nesterov=group["nesterov"], maximize=group["maximize"], grad_scale=scale)

    def is_first(each: Flat) -> bool:
        return bool(momentum) and optimizer.state[each.master].get("momentum_buffer") is None

    # PyTorch takes a step for the first one if it is that for all parameters, and fails if it is for some.
    for first, some in [(first, list(some)) for first, some in itertools.groupby(flat, is_first)]:

        def kernel(wide: list[Tensor], gradients: list[Tensor], pieces: list[_Piece], first: bool = first) -> None:
            buffers = [buffer for piece in pieces for buffer in piece.kept]
            torch._fused_sgd_(wide, gradients, buffers, **options, is_first_step=first)

        if first:
            for each in some:
                # The kernel of the first step does not read it.
                optimizer.state[each.master]["momentum_buffer"] = torch.empty_like(each.like(), dtype=torch.float32)
        kept = [[optimizer.state[each.master]["momentum_buffer"]] if momentum else [] for each in some]
        _run([_Job(each, tensors, None) for each, tensors in zip(some, kept, strict=True)], kernel, numbers)


def _run(jobs: list[_Job], kernel: Kernel, numbers: Numbers) -> None:
    # Every block makes all threads wait for each other, so there are not more of them for more threads.
    block = BLOCK * min(torch.get_num_threads(), _MOST_THREADS)
    for owner, some in itertools.groupby(jobs, lambda job: job.flat.master.owner):
        own = list(some)
        for_gradients = _buffer([job.flat.gradient for job in own], block)
        for_values = _buffer([job.flat.wide for job in own], block)
        generator = numbers.of(owner)
        for pieces in _batches(_pieces(own, block), block):
            gradients = _lifted([(piece.gradient, None) for piece in pieces], for_gradients)
            wide = _lifted([(piece.wide, piece.compensation) for piece in pieces], for_values)
            kernel(wide, gradients, pieces)
            _round(pieces, wide, generator)


def _buffer(tensors: Iterable[Tensor], block: int) -> Tensor:
    """Make room for what has to be converted to float32, up to a block."""
    size = min(block, sum(one.numel() for one in tensors if one.dtype is not torch.float32))
    return torch.empty(size, dtype=torch.float32, device="cpu")


def _lifted(pieces: Sequence[tuple[Tensor, Tensor | None]], buffer: Tensor) -> list[Tensor]:
    """Give tensors in float32, those that are not with what they lack added, in the buffer."""
    if len(pieces) == 1 and pieces[0][1] is None:
        # A part of a large parameter, as most are: each call less is felt.
        one = pieces[0][0]
        return [one] if one.dtype is torch.float32 else [buffer[: one.numel()].copy_(one)]
    narrow = [(one, rest) for one, rest in pieces if one.dtype is not torch.float32]
    sizes = [one.numel() for one, _ in narrow]
    room = list(buffer[: sum(sizes)].split(sizes)) if sizes else []
    lacking = [rest for _, rest in narrow if rest is not None]
    widen_(room, [one for one, _ in narrow], lacking or None)
    there = iter(room)
    return [one if one.dtype is torch.float32 else next(there) for one, _ in pieces]


def _round(pieces: list[_Piece], wide: list[Tensor], generator: torch.Generator | None) -> None:
    if len(pieces) == 1 and generator is None and pieces[0].compensation is None:
        pieces[0].low.copy_(wide[0])
        return
    low = [piece.low for piece in pieces]
    compensation = [piece.compensation for piece in pieces if piece.compensation is not None]
    if compensation:
        split_(low, compensation, wide, seed=generator)
    elif generator is not None:
        round_stochastic_(low, wide, seed=generator)
    else:
        round_nearest_(low, wide)


def _pieces(jobs: list[_Job], block: int) -> Iterator[_Piece]:
    for flat, tensors, step in jobs:
        if not flat.low.numel():
            continue
        views = [one.as_strided((one.numel(),), (1,)) for one in tensors]
        lacking = [] if flat.compensation is None else [flat.compensation]
        split = [one.split(block) for one in (flat.gradient, flat.wide, flat.low, *lacking, *views)]
        for gradient, wide, low, *others in zip(*split, strict=True):
            yield _Piece(gradient, wide, low, others.pop(0) if lacking else None, tuple(others), step)


def _batches(pieces: Iterable[_Piece], block: int) -> Iterator[list[_Piece]]:
    """Put small pieces together, up to a block."""
    batch: list[_Piece] = []
    filled = 0
    for piece in pieces:
        if batch and filled + piece.low.numel() > block:
            yield batch
            batch, filled = [], 0
        batch.append(piece)
        filled += piece.low.numel()
    if batch:
        yield batch
