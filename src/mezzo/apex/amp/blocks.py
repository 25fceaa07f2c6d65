"""A block of ``scale_loss``: what it does to the gradients of its optimizers on entry, at its end, and after an exception.

While a block is open, the gradients of its optimizers are multiplied by its scale, whatever is done in it. A block inside of
it that adds to the same gradients takes that scale too, and leaves the unscaling to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from mezzo.apex.amp.stash import AmpStash, sharing
from mezzo.apex.amp.steps import recover
from mezzo.apex.amp.unscaling import is_zero, multiply, put_aside, put_back, unscale
from mezzo.errors import AmpError
from mezzo.scaling import Verdict
from mezzo.torch.masters.copies import owner_of
from mezzo.torch.masters.places import take_in

if TYPE_CHECKING:
    from mezzo.apex.amp.loss_scaler import LossScaler

__all__ = ["Block", "block_around"]


def block_around(stashes: Sequence[AmpStash]) -> Block | None:
    """Give the block that is open for some of the optimizers; None if there is none.

    Args:
        stashes: Of the optimizers, and of those that share parameters with them.

    Raises:
        AmpError: There are several, of different scales.
    """
    found = {id(stash.block): stash.block for stash in stashes if stash.block is not None}
    if len({block.scale for block in found.values()}) > 1:
        scales = " and ".join(f"{block.scale:g}" for block in found.values())
        msg = (
            f"amp.scale_loss was called inside of blocks of its optimizers that have different scales, {scales}. Leave one "
            "of the blocks before, or add the losses up and give the sum one block."
        )
        raise AmpError(msg)
    return next(iter(found.values()), None)


@dataclass(eq=False)
class Block:
    """A block that is open.

    Args:
        passed: Of the optimizers that ``scale_loss`` got and for which no other block is open.
        scale: By which the loss is multiplied.
        scalers: Who is told the verdict, with ``loss_id``; those of blocks inside come along.
        delay: Whether gradients stay scaled at the end.
        check: Whether anybody is told.

    Attributes:
        opened: Those of `passed`, and the other optimizers that have some of their parameters.
        told: The verdict that the scalers have been told already, by a step in the block.
    """

    passed: list[AmpStash]
    scale: float
    scalers: list[tuple[LossScaler, int]]
    delay: bool = False
    check: bool = True
    told: Verdict | None = None
    opened: list[AmpStash] = field(default_factory=list)
    _factors: list[float] = field(default_factory=list)
    _parameters: list[Tensor] = field(default_factory=list)
    _having: set[int] = field(default_factory=set)
    _aside: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def enter(self) -> None:
        """Multiply the gradients that are there, so that the block can add to them."""
        for stash in self.passed:
            recover(stash)
        others = [stash for stash in sharing(self.passed) if stash.block is None]
        # Gradients that are scaled already first: they may be some of those that another optimizer has too.
        opened = sorted([*self.passed, *others], key=_is_unscaled) if others else self.passed
        self._factors = [stash.factor for stash in opened]
        self.opened = opened
        for stash in self.opened:
            self._open(stash)
        if len(self.opened) > 1:
            # One that several optimizers have is looked at once.
            self._parameters = list({id(one): one for one in self._parameters}.values())

    def _open(self, stash: AmpStash) -> None:
        owner = owner_of(stash.optimizer)
        if owner is not None:
            # Groups that were added since get their masters before their first gradients come.
            take_in(stash.optimizer, owner)
        mine = stash.holders()
        self._parameters = self._parameters + mine if self._parameters else mine
        having = [one for one in mine if one.grad is not None and id(one) not in self._having]
        if stash.pending is not None:
            having = self._after_overflow(stash, having)
        self._having.update(map(id, having))
        if having and not self.delay and stash.factor == 1.0:
            self._aside += put_aside(having)
            having = [one for one in having if one.grad is not None]
        if having and stash.factor != self.scale:
            multiply(having, self.scale / stash.factor)
        stash.factor, stash.block = self.scale, self
        stash.scaler = self.scalers[0]

    def _after_overflow(self, stash: AmpStash, having: list[Tensor]) -> list[Tensor]:
        """See whether the gradients that overflowed are still there.

        If the user has zeroed them, the step that they would have spoilt is not skipped. If not, they are to spoil no other
        loss's verdict: they are put aside for the block, and the step is skipped.
        """
        if not having or is_zero(having):
            stash.pending = None
            return having
        self._aside += put_aside(having, every=True)
        self._having.update(map(id, having))
        return []

    def leave(self) -> None:
        """End the block: unscale the gradients, tell the verdict."""
        if not self.delay and self.opened:
            unscale(self.opened, self._parameters, self.scalers, check=self.check, arm=self.passed, told=self.told)
        put_back(self._aside, add=True)
        self._close()

    def abandon(self) -> None:
        """Undo `enter`, after an exception in the block."""
        for one in self._parameters:
            if one.grad is not None and id(one) not in self._having:
                one.grad = None
        done: set[int] = {id(one) for one, _ in self._aside}
        for stash, factor in zip(self.opened, self._factors, strict=True):
            mine = [one for one in stash.having() if id(one) not in done]
            if mine and stash.factor != factor:
                multiply(mine, factor / stash.factor)
            done.update(map(id, mine))
            stash.factor = factor
        put_back(self._aside, add=False)
        self._close()

    def _close(self) -> None:
        for stash in self.opened:
            stash.block = None


def _is_unscaled(stash: AmpStash) -> bool:
    return stash.factor == 1.0
