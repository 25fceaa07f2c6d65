"""How float32 values become bfloat16 or float16 ones: to the nearest, by chance, or with the remainder kept.

Rounding to nearest loses an update that is less than half a step of the low dtype, every time. Two ways out are here.
Stochastic rounding takes one of the two enclosing low values, each with the probability that makes the expected value
exact; see Gupta et al., "Deep Learning with Limited Numerical Precision", https://arxiv.org/abs/1502.02551. A
compensation keeps what rounding has cut off in a second low tensor, as in Kahan's summation; both are compared in Zamirai
et al., "Revisiting BFloat16 Training", https://arxiv.org/abs/2010.06192.

All functions take lists of tensors, work in place, record no autograd graph and never read a value back to the host. Of a
DTensor they work on the local shard. They hold no state: threads may call them at the same time with different tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mezzo.errors import DtypeError
from mezzo.torch.agreement import local

__all__ = ["generator_for", "may_come_from", "round_nearest_", "round_stochastic_", "split_", "widen_"]

_LOW = (torch.bfloat16, torch.float16)

_CPU_BLOCK, _BLOCK = 2**16, 2**23
"""Elements in a block: the dozen tensors of the way stay in a CPU's cache; elsewhere each kernel has enough to do."""

_DRAWS = 2**24
"""How many different numbers are drawn: as many as float32 holds exactly, whatever the device's generator."""


@torch.no_grad()
def round_nearest_(low: Sequence[Tensor], wide: Sequence[Tensor]) -> None:
    """Round to nearest, ties to even: bit for bit what ``wide.to(low.dtype)`` gives, in one call for all tensors.

    Args:
        low: Tensors to write to, bfloat16 or float16, of any shape and layout.
        wide: As many float32 tensors of the same shapes.

    Example:
        >>> import torch
        >>> from mezzo.torch.masters.rounding import round_nearest_
        >>> low = torch.zeros(2, dtype=torch.bfloat16)
        >>> round_nearest_([low], [torch.tensor([1.001, 1.005])])
        >>> low
        tensor([1.0000, 1.0078], dtype=torch.bfloat16)
    """
    if low:
        torch._foreach_copy_([local(one) for one in low], [local(one) for one in wide])


def generator_for(device: torch.device, seed: int, count: int) -> torch.Generator:
    """Make the generator of one rounding: what `round_stochastic_` draws its numbers from.

    Each element takes one number, tensor after tensor and in each in the order of its memory. So a list can be rounded in
    pieces, one after the other with the same generator, to the same bits as in one call.

    Args:
        device: Of the tensors.
        seed: Any integer.
        count: Which rounding this is.

    Returns:
        A generator at its start; each call gives another one.

    Example:
        >>> import torch
        >>> from mezzo.torch.masters.rounding import generator_for, round_stochastic_
        >>> low, wide = torch.zeros(2, 100, dtype=torch.bfloat16), torch.full((100,), 1.001)
        >>> generator = generator_for(low.device, 0, 3)
        >>> for piece in (slice(70), slice(70, 100)):
        ...     round_stochastic_([low[0, piece]], [wide[piece]], seed=generator)
        >>> round_stochastic_([low[1]], [wide], seed=0, count=3)
        >>> torch.equal(low[0], low[1])
        True
    """
    digest = hashlib.blake2b(str(seed).encode(), digest_size=8).digest()
    # The CPU's generator takes the low 32 bits alone. Added to them, no two of 2**32 counts in a row share a stream.
    return torch.Generator(device).manual_seed((int.from_bytes(digest, "little") + count) % 2**64)


@torch.no_grad()
def round_stochastic_(
    low: Sequence[Tensor],
    wide: Sequence[Tensor],
    *,
    seed: int | torch.Generator,
    count: int = 0,
    skip: Tensor | None = None,
) -> None:
    """Round each value to one of its two neighbours in the low dtype, so that the expected value is the value itself.

    The probability of the neighbour away from zero is the share of the way to it, in steps of 2**-24: exact for bfloat16 and
    for the normal numbers of float16. Below float16's normal numbers it is the share rounded up to the next such step. A
    value that the low dtype holds stays as it is, so do signs, also of zero, infinities and NaN. Above the largest finite
    value there is nothing to choose from: rounding is to nearest there.

    Args:
        low: Tensors to write to, bfloat16 or float16, of any shape and layout.
        wide: As many float32 tensors of the same shapes.
        seed: Any integer. The global random number generators are neither asked nor changed. Or a generator on the
            tensors' one device, which goes on from where it is; see `generator_for`.
        count: Which call this is. The same seed and count give the same bits on the same kind of device; another count
            gives other numbers, and so do the positions in the list. Ranks with the same seed draw the same numbers, as
            replicas have to.
        skip: 0-dim flag; where it is above 0, ``low`` stays bit for bit as it was.

    Raises:
        DtypeError: A tensor of ``low`` is neither bfloat16 nor float16.

    Example:
        >>> import torch
        >>> from mezzo.torch.masters.rounding import round_stochastic_
        >>> low = torch.zeros(100_000, dtype=torch.bfloat16)
        >>> round_stochastic_([low], [torch.full_like(low, 1.001, dtype=torch.float32)], seed=0, count=0)
        >>> low.unique()
        tensor([1.0000, 1.0078], dtype=torch.bfloat16)
        >>> round(low.float().mean().item(), 3)
        1.001
    """
    generators: dict[torch.device, torch.Generator] = {}
    for target, source in zip(low, wide, strict=True):
        here, value = local(target), local(source)
        _check(here)
        if here.device not in generators:
            made = seed if isinstance(seed, torch.Generator) else generator_for(here.device, seed, count)
            generators[here.device] = made
        for to, block in _blocks(here, value):
            _write_(to, _by_chance(block, to.dtype, generators[here.device]), skip)


@torch.no_grad()
def widen_(wide: Sequence[Tensor], low: Sequence[Tensor], compensation: Sequence[Tensor] | None) -> None:
    """Make float32 values of low ones and of what rounding them had cut off.

    Args:
        wide: Float32 tensors to write to, of any shape and layout.
        low: As many tensors of the same shapes, bfloat16 or float16.
        compensation: As many again, as `split_` leaves them, or None.

    Example:
        >>> import torch
        >>> from mezzo.torch.masters.rounding import widen_
        >>> wide = torch.zeros(1)
        >>> widen_([wide], [torch.ones(1).bfloat16()], [torch.full((1,), 2.0**-10).bfloat16()])
        >>> wide.item()
        1.0009765625
    """
    if not wide:
        return
    here = [local(one) for one in wide]
    torch._foreach_copy_(here, [local(one) for one in low])
    if compensation is not None:
        torch._foreach_add_(here, [local(one) for one in compensation])


@torch.no_grad()
def split_(
    low: Sequence[Tensor],
    compensation: Sequence[Tensor],
    wide: Sequence[Tensor],
    *,
    seed: int | torch.Generator | None = None,
    count: int = 0,
    skip: Tensor | None = None,
) -> None:
    """Round float32 values, and keep what was cut off, itself rounded to nearest.

    `widen_` puts the two together again: in bfloat16 to within 2**-17 of the value, in float16 to within 2**-23 of it, and
    no better than 2**-25. With stochastic rounding it is twice that in each case but the last. Splitting what `widen_` gave
    loses nothing more.

    Args:
        low: Tensors to write the rounded values to, bfloat16 or float16, of any shape and layout.
        compensation: As many tensors of the same shapes and dtypes, to write the remainders to. Where ``low`` is infinite
            or NaN the remainder is 0.
        wide: As many float32 tensors of the same shapes.
        seed: None rounds to nearest, an integer or a generator stochastically, as in `round_stochastic_`.
        count: As in `round_stochastic_`.
        skip: 0-dim flag; where it is above 0, ``low`` and ``compensation`` stay bit for bit as they were.

    Raises:
        DtypeError: A tensor of ``low`` is neither bfloat16 nor float16, and ``seed`` is given.

    Example:
        >>> import torch
        >>> from mezzo.torch.masters.rounding import split_
        >>> low, compensation = torch.zeros(2, 1, dtype=torch.bfloat16)
        >>> split_([low], [compensation], [torch.tensor([1.0009765625])])
        >>> low.item(), compensation.item() == 2.0**-10
        (1.0, True)
    """
    if seed is not None:
        round_stochastic_(low, wide, seed=seed, count=count, skip=skip)
    elif skip is None:
        round_nearest_(low, wide)
    else:
        for target, source in zip(low, wide, strict=True):
            here = local(target)
            _write_(here, local(source).to(here.dtype), skip)
    for rounded, rest, source in zip(low, compensation, wide, strict=True):
        for here, kept, block in _blocks(local(rounded), local(rest), local(source)):
            cut = block - here
            # Infinity less infinity would be NaN, and a finite value less infinity would turn the sum into NaN.
            cut.masked_fill_(~here.isfinite(), 0.0)
            _write_(kept, cut.to(kept.dtype), skip)


@torch.no_grad()
def may_come_from(low: Tensor, wide: Tensor) -> Tensor:
    """Say of each low value whether rounding, to nearest or stochastic, can have made it of the float32 value.

    Args:
        low: A tensor, bfloat16 or float16, of any shape and layout.
        wide: A float32 tensor of the same shape.

    Returns:
        A bool tensor of that shape: True where ``low`` is the value itself or one of its two neighbours. The two zeros
        are the same, and any NaN comes from any NaN.

    Raises:
        DtypeError: ``low`` is neither bfloat16 nor float16.

    Example:
        >>> import torch
        >>> from mezzo.torch.masters.rounding import may_come_from
        >>> low = torch.tensor([1.0, 1.0078125, 1.0], dtype=torch.bfloat16)
        >>> may_come_from(low, torch.tensor([1.001, 1.001, 1.01]))
        tensor([ True,  True, False])
    """
    here, value = local(low), local(wide)
    _check(here)
    inner, outer = _neighbours(value, here.dtype)
    # Not the outer one of a value that is exact, nor infinity for one that is nearer to the largest finite value.
    reaches = (here == outer) & (inner.abs() < value.abs()) & (outer.abs() < math.inf)
    return (here == inner) | reaches | (here.isnan() & value.isnan())


def _blocks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Cut tensors of one shape into pieces, so that what is computed on the way is small; not where layouts differ."""
    first = tensors[0]
    size = _CPU_BLOCK if first.device.type == "cpu" else _BLOCK
    if first.numel() <= size:
        return (tensors,)
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    in_order = [one.permute(order) for one in tensors]
    if not all(one.is_contiguous() for one in in_order):
        return (tensors,)
    return zip(*(one.view(-1).split(size) for one in in_order), strict=True)


def _check(low: Tensor) -> None:
    if low.dtype not in _LOW:
        msg = f"Stochastic rounding is to torch.bfloat16 or torch.float16, got a tensor of {low.dtype}; leave it out."
        raise DtypeError(msg)


def _neighbours(wide: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Give the low values that enclose each value: the one toward zero, or the value itself, and the next one outwards.

    What rounds to infinity or NaN has that as its inner one, and NaN as its outer one.
    """
    inner = wide.to(dtype)
    magnitude = inner.abs()
    back = (magnitude > wide.abs()) & (magnitude < math.inf)
    bits = inner.view(torch.int16)  # sign and magnitude: one less is the next value toward zero, through subnormals too
    bits -= back.to(torch.int16)
    return inner, (bits + 1).view(dtype)


def _by_chance(wide: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    inner, outer = _neighbours(wide, dtype)
    # Both differences and their ratio are exact in float32: the dividend has the bits that rounding cuts off, the divisor
    # is a power of 2. It is infinite for what lies above the largest finite value, and 0 or NaN outward stay behind.
    share = (wide - inner).abs_()
    share /= (outer.float() - inner).abs_()
    share *= _DRAWS
    draws = torch.empty_like(share).random_(0, _DRAWS, generator=generator)
    return torch.where(draws < share, outer, inner)


def _write_(target: Tensor, value: Tensor, skip: Tensor | None) -> None:
    target.copy_(value if skip is None else torch.where(skip.to(target.device) > 0, target, value))
