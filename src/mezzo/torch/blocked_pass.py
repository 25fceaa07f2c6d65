"""PyTorch's fused optimizer steps on a CPU, in blocks that stay in the cache.

A block's gradients are converted to float32 into a buffer that is used again for the next one, PyTorch's own kernel steps
the block, and the result is rounded to the model while it is still in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mezzo.torch.single_pass import Flat

__all__ = ["number", "update_"]

BLOCK = 2**18
"""How many elements a thread works on at a time; a multiple of the 16 by which PyTorch's kernels divide their work.

With 2**15 of them the calls cost a fifth of what is saved, with 2**22 their memory leaves the cache; in between it makes
little difference, and fewer blocks are fewer times at which threads wait for each other.
"""
_MOST_THREADS = 16


class _Piece(NamedTuple):
    """Up to a block of one parameter, as 1-D views."""

    gradient: Tensor
    wide: Tensor
    low: Tensor
    kept: tuple[Tensor, ...]
    step: Tensor | None


Kernel = Callable[[list[Tensor], list[Tensor], list[_Piece]], None]
"""Steps float32 parameters by float32 gradients."""


def update_(optimizer: torch.optim.Optimizer, group: dict[str, Any], flat: list[Flat], scale: Tensor | None) -> None:
    """Step masters and round them to the model; see `mezzo.torch.single_pass.update_`.

    Args:
        optimizer: An Adam, AdamW or SGD.
        group: Its group, with ``fused=True``.
        flat: Masters of the group, on a CPU; Adam's have their state.
        scale: What to divide gradients by; float32, of one element, on the CPU.
    """
    if type(optimizer) is torch.optim.SGD:
        _update_sgd(optimizer, group, flat, scale)
    else:
        _update_adam(optimizer, group, flat, scale)


def number(value: float | Tensor) -> float:
    """Give a hyperparameter, which may be a tensor, as a number."""
    return float(value.item()) if isinstance(value, Tensor) else value


def _update_adam(optimizer: Any, group: dict[str, Any], flat: list[Flat], scale: Tensor | None) -> None:
    beta1, beta2 = map(number, group["betas"])
    numbers: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "grad_scale": scale}
    numbers.update((name, number(group[name])) for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize"))
    op = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 2 + bool(group["amsgrad"])]

    def kernel(wide: list[Tensor], gradients: list[Tensor], pieces: list[_Piece]) -> None:
        kept = [[piece.kept[place] for piece in pieces] for place in range(len(names))]
        means, squares, largest = [*kept, []][:3]
        steps = [piece.step for piece in pieces if piece.step is not None]
        op(wide, gradients, means, squares, largest, steps, **numbers)

    states = [optimizer.state[each.master] for each in flat]
    # Once per step: the kernel reads it for every block.
    torch._foreach_add_([state["step"] for state in states], 1)
    kept = [[state[name] for name in names] for state in states]
    _run(flat, kept, [state["step"] for state in states], kernel)


def _update_sgd(optimizer: Any, group: dict[str, Any], flat: list[Flat], scale: Tensor | None) -> None:
    momentum = group["momentum"]
    numbers: dict[str, Any] = {name: number(group[name]) for name in ("lr", "momentum", "weight_decay", "dampening")}
    numbers.update(nesterov=group["nesterov"], maximize=group["maximize"], grad_scale=scale)
    # PyTorch takes a step for the first one if it is that for all parameters, and fails if it is for some.
    later = [bool(momentum) and optimizer.state[each.master].get("momentum_buffer") is not None for each in flat]
    for first in (False, True):
        some = [each for each, is_later in zip(flat, later, strict=True) if is_later is not first]

        def kernel(
            wide: list[Tensor], gradients: list[Tensor], pieces: list[_Piece], first: bool = bool(momentum) and first
        ) -> None:
            buffers = [buffer for piece in pieces for buffer in piece.kept]
            torch._fused_sgd_(wide, gradients, buffers, **numbers, is_first_step=first)

        if momentum and first:
            for each in some:
                # The kernel of the first step does not read it.
                optimizer.state[each.master]["momentum_buffer"] = torch.empty_like(each.master.values())
        kept = [[optimizer.state[each.master]["momentum_buffer"]] if momentum else [] for each in some]
        _run(some, kept, [None] * len(some), kernel)


def _run(flat: list[Flat], kept: list[list[Tensor]], steps: Iterable[Tensor | None], kernel: Kernel) -> None:
    # Every block makes all threads wait for each other, so there are not more of them for more threads.
    block = BLOCK * min(torch.get_num_threads(), _MOST_THREADS)
    size = min(block, sum(each.wide.numel() for each in flat if each.gradient.dtype is not torch.float32))
    buffer = torch.empty(size, dtype=torch.float32, device="cpu")
    for pieces in _batches(_pieces(flat, kept, steps, block), block):
        narrow = [piece.gradient for piece in pieces if piece.gradient.dtype is not torch.float32]
        lifted = list(buffer[: sum(map(Tensor.numel, narrow))].split([one.numel() for one in narrow]))
        if narrow:
            torch._foreach_copy_(lifted, narrow)
        lifted.reverse()
        gradients = [piece.gradient if piece.gradient.dtype is torch.float32 else lifted.pop() for piece in pieces]
        wide = [piece.wide for piece in pieces]
        kernel(wide, gradients, pieces)
        torch._foreach_copy_([piece.low for piece in pieces], wide)


def _pieces(flat: list[Flat], kept: list[list[Tensor]], steps: Iterable[Tensor | None], block: int) -> Iterator[_Piece]:
    for each, tensors, step in zip(flat, kept, steps, strict=True):
        if not each.wide.numel():
            continue
        views = [one.as_strided((one.numel(),), (1,)) for one in tensors]
        split = [one.split(block) for one in (each.gradient, each.wide, each.low, *views)]
        for gradient, wide, low, *others in zip(*split, strict=True):
            yield _Piece(gradient, wide, low, tuple(others), step)


def _batches(pieces: Iterable[_Piece], block: int) -> Iterator[list[_Piece]]:
    """Put small pieces together, up to a block."""
    batch: list[_Piece] = []
    filled = 0
    for piece in pieces:
        if batch and filled + piece.wide.numel() > block:
            yield batch
            batch, filled = [], 0
        batch.append(piece)
        filled += piece.wide.numel()
    if batch:
        yield batch
