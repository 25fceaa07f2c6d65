"""What `mezzo.apex.amp` knows of an optimizer: ``optimizer._amp_stash``, and the other attributes that scripts use.

Apex kept copies of gradients and lists of parameters there. Here a gradient stays where it is, and the stash knows by which
factor it is multiplied; the lists are made when they are read.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mezzo.apex.amp.checks import inner_optimizer
from mezzo.errors import AmpError
from mezzo.torch.masters.params import Master
from mezzo.torch.masters.steps import refresh_model
from mezzo.torch.scaling.gradients import each_parameter_of

if TYPE_CHECKING:
    from mezzo.apex.amp.blocks import Block
    from mezzo.apex.amp.loss_scaler import LossScaler
    from mezzo.torch.scaling.closures import Kept

__all__ = ["AmpStash", "Begun", "attach_stash", "sharing", "stash_of"]

_all: weakref.WeakSet[AmpStash] = weakref.WeakSet()
_numbers = itertools.count()
_shared: dict[tuple[tuple[int, int], ...], dict[int, list[weakref.ref[AmpStash]]]] = {}
"""By how many parameters each optimizer has: which share some with which, by number; the last answer only."""


@dataclass
class Begun:
    """A step that is going on.

    Attributes:
        frame: Of PyTorch's wrapper around ``step``.
        hidden: The gradients that were taken away.
        kept: What is put back if the step is not to be made.
        failed: Whether it is so, as gradients have overflowed.
        numbers: Attributes of the optimizer that are put back then.
        scale: By what the gradients are to be multiplied after it again, since a block is open.
    """

    frame: FrameType
    hidden: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    kept: Kept | None = None
    failed: bool = False
    numbers: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0


class AmpStash:
    """The state of one optimizer. In Apex a plain namespace; these of its names can be read.

    Attributes:
        number: Of this stash, in the process.
        factor: By what the gradients are multiplied; 1.0 if they are not scaled.
        pending: The scaler for whose overflow the next step is to be skipped, and its ``loss_id``; None if it is to be made.
        begun: The step that is going on.
        scaler: The scaler of the last block, and its ``loss_id``.
        block: The block that is open for this optimizer.
        warned: Whether a warning of gradients that were still scaled has been given.
        lazy_init_called: Whether masters are there; always, they are made by ``initialize``. Scripts set it.
        already_patched: Whether a skip is armed, as `pending` says.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.number = next(_numbers)
        self.factor = 1.0
        self.pending: tuple[LossScaler, int] | None = None
        self.begun: Begun | None = None
        self.scaler: tuple[LossScaler, int] | None = None
        self.block: Block | None = None
        self.warned = False
        self.lazy_init_called = True
        _all.add(self)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer.

        Raises:
            AmpError: It is gone.
        """
        found = self._optimizer()
        if found is None:
            msg = "The optimizer of this _amp_stash is gone. Read optimizer._amp_stash of one that is in use."
            raise AmpError(msg)
        return found

    @property
    def already_patched(self) -> bool:
        """Whether the next step is to be skipped."""
        return self.pending is not None

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether gradients are still scaled, after a block with ``delay_unscale=True``."""
        return self.factor != 1.0

    # The lists of Apex: with masters

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """For each of the optimizer's groups, the masters."""
        return self._by_group(Master)

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """For each group, the parameters of the model that have masters, in the same order."""
        return [[one.model_param for one in group] for group in self._by_group(Master)]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """For each group, the float32 parameters that need no master."""
        return [
            [one for one in group["params"] if not isinstance(one, Master) and one.dtype is torch.float32]
            for group in self.optimizer.param_groups
        ]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The masters."""
        return _flat(self.fp32_from_fp16_groups)

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The low-precision parameters: those that have masters, and those that the optimizer updates themselves."""
        low = (torch.float16, torch.bfloat16)
        return [one for one in self.holders() if one.dtype in low]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The float32 parameters that need no master."""
        return _flat(self.fp32_from_fp32_groups)

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """The float32 parameters of the model."""
        return _flat(self.fp32_from_fp32_groups)

    def _by_group(self, kind: type) -> list[list[Any]]:
        return [[one for one in group["params"] if isinstance(one, kind)] for group in self.optimizer.param_groups]

    def holders(self) -> list[Tensor]:
        """List the tensors whose ``grad`` a backward pass writes to: the model's parameters, group by group."""
        return list(_holders(self.optimizer))

    def having(self) -> list[Tensor]:
        """List those of `holders` that have a gradient."""
        return [one for one in _holders(self.optimizer) if one.grad is not None]


def _holders(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for one in each_parameter_of(optimizer):
        yield one.model_param if isinstance(one, Master) else one


def _flat(groups: list[list[Tensor]]) -> list[Tensor]:
    return [one for group in groups for one in group]


def stash_of(optimizer: Any) -> AmpStash | None:
    """Give what ``initialize`` put on an optimizer; None if it has not seen it."""
    found = getattr(optimizer, "__dict__", {}).get("_amp_stash")
    return found if isinstance(found, AmpStash) else None


def attach_stash(optimizer: Any) -> None:
    """Put the attributes on an optimizer that scripts use. Its methods stay its own.

    Args:
        optimizer: One that ``initialize`` got; a wrapper such as LARC shares the stash of the one inside.
    """
    inner = inner_optimizer(optimizer)
    stash = stash_of(inner) or AmpStash(inner)
    both: list[Any] = [inner] if inner is optimizer else [inner, optimizer]
    for one in both:
        one._amp_stash = stash
        one._lazy_init_maybe_master_weights = _nothing_left_to_do
        one._amp_lazy_init = _nothing_left_to_do
        one._master_params_to_model_params = _Refresh(stash)


def sharing(stashes: Sequence[AmpStash]) -> list[AmpStash]:
    """List the optimizers that have parameters of others too.

    Args:
        stashes: Of the others.

    Returns:
        Stashes that are none of these.
    """
    if len(_all) == len(stashes):
        return []
    # Optimizers are held while they are looked at: they may be collected at any moment.
    alive = [(stash, optimizer) for stash in _all if (optimizer := stash._optimizer()) is not None]
    sizes = tuple(sorted((stash.number, sum(1 for _ in each_parameter_of(one))) for stash, one in alive))
    if sizes not in _shared:
        _shared.clear()
        _shared[sizes] = _find_sharing(alive)
    near = [other() for stash in stashes for other in _shared[sizes].get(stash.number, ())]
    return list({other.number: other for other in near if other is not None and other not in stashes}.values())


def _find_sharing(
    stashes: Sequence[tuple[AmpStash, torch.optim.Optimizer]],
) -> dict[int, list[weakref.ref[AmpStash]]]:
    found: dict[int, list[weakref.ref[AmpStash]]] = {}
    ids = [(stash, set(map(id, _holders(optimizer)))) for stash, optimizer in stashes]
    for (one, mine), (other, theirs) in itertools.permutations(ids, 2):
        if mine & theirs:
            found.setdefault(one.number, []).append(weakref.ref(other))
    return found


def _nothing_left_to_do() -> None:
    """Masters are made by ``initialize``."""


class _Refresh:
    """Writes masters to the model, after a script has written to them."""

    def __init__(self, stash: AmpStash) -> None:
        self._stash = stash

    def __call__(self) -> None:
        refresh_model(self._stash.optimizer)
