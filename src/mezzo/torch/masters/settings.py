"""What the float32 masters of one model share: how they were asked for, and the step that is going on."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .params import Master

__all__ = ["Owner", "Settings"]


@dataclass(frozen=True)
class Settings:
    """How the parameters of one model are stored, as `mezzo.torch.prepare` was told.

    Attributes:
        dtype: That of the model's parameters.
        masters: Whether the optimizer holds float32 masters; ``"kahan"`` if a compensation stands for them.
        rounding: How masters are rounded to parameters.
        seed: Of stochastic rounding.
        grad_dtype: Of gradients; None if only those are float32 that are sums.
        compiled: Whether optimizers that can be step in one compiled pass.
    """

    dtype: torch.dtype
    masters: Literal[True, False, "kahan"] = True
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0
    grad_dtype: torch.dtype | None = None
    compiled: bool = False

    @property
    def keeps_masters(self) -> bool:
        """Whether float32 masters are there between steps."""
        return self.masters is True

    @property
    def steps_in_float32(self) -> bool:
        """Whether optimizers step on float32 values, kept or not; else on the low parameters themselves."""
        return self.masters is not False or self.rounds_at_random

    @property
    def rounds_at_random(self) -> bool:
        """Whether rounding is stochastic."""
        return self.rounding == "stochastic"


@dataclass
class Begun:
    """A step that has begun.

    Attributes:
        frame: Of PyTorch's wrapper around ``step``, which calls the hooks.
        has_closure: Whether the optimizer evaluates the model itself.
        versions: The version counters of the masters when they and the model were last brought together.
        paused: For `mezzo.torch.eager.resume_compiling`.
        thread: In which it runs.
    """

    frame: FrameType
    has_closure: bool
    versions: list[int]
    paused: Any = None
    thread: int = field(default_factory=threading.get_ident)


class Owner:
    """What the masters of one `mezzo.torch.prepare` share.

    Attributes:
        settings: As they were given.
        rounds: How many stochastic roundings there were; with the seed it gives the next one's numbers.
        steps: By the identity of the optimizer, the steps that have begun; one that raised stays until the next.
    """

    def __init__(self, settings: Settings, rounds: int = 0) -> None:
        self.settings = settings
        self.rounds = rounds
        self._step: tuple[FrameType, dict[int, Tensor | None], int] | None = None
        self.steps: dict[int, Begun] = {}

    def begun(self, optimizer: torch.optim.Optimizer, frame: FrameType) -> Begun | None:
        """Give the step of an optimizer that is going on around a frame; None if there is none."""
        begun = self.steps.get(id(optimizer))
        return begun if begun is not None and begun.frame is not frame and is_on_stack(begun.frame) else None

    def is_in_step_of_another(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether another optimizer's step is going on around: its masters have values that are not to be touched."""
        return any(key != id(optimizer) and is_on_stack(begun.frame) for key, begun in self.steps.items())

    def open_step(self, frame: FrameType, gradients: dict[int, Tensor | None]) -> None:
        """Show these gradients, by the masters' identities, to whoever reads them below ``frame``."""
        self._step = (frame, gradients, threading.get_ident())

    def close_step(self) -> None:
        """Show the gradients of the model's parameters again."""
        self._step = None

    def done_in_step(self) -> frozenset[int]:
        """Give the identities of the masters whose step is done without the optimizer."""
        if self._step is None:
            return frozenset()
        return frozenset(key for key, gradient in self._step[1].items() if gradient is None)

    def shown(self, master: Master) -> tuple[Tensor | None] | None:
        """Give a 1-tuple of the gradient to show in the step that is going on; None outside, and where there is no other."""
        if self._step is None:
            return None
        step_frame, gradients, thread = self._step
        if not is_on_stack(step_frame):
            if thread == threading.get_ident():
                # The step has ended in an exception: no hook is called then.
                self._step = None
            return None
        return (gradients[id(master)],) if id(master) in gradients else None

    def assign(self, master: Master, gradient: Tensor | None) -> None:
        """Have a step that is going on go on with a gradient that it has assigned."""
        if self.shown(master) is not None and self._step is not None:
            self._step[1][id(master)] = gradient

    def forget_failed(self) -> None:
        """Let go of steps that ended in an exception, and of what their frames hold."""
        for key in [key for key, begun in self.steps.items() if not is_on_stack(begun.frame)]:
            if self.steps[key].thread == threading.get_ident():
                del self.steps[key]

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings, "rounds": self.rounds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def is_on_stack(frame: FrameType) -> bool:
    """Say whether a call is still going on, in this thread."""
    here: FrameType | None = sys._getframe(1)
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None
