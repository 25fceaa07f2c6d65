"""What a `GradScaler` tells about the steps of its optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from mezzo.errors import ScalingError
from mezzo.report.nonfinite import NonFiniteReport
from mezzo.torch.eager import runs_eagerly

from .gradients import are_same, parameters_of, versions_of
from .nonfinite import NonFinite, count
from .overflow_explaining import OverflowExplainer
from .steps import ScalerSteps

__all__ = ["Reports"]


class Reports(ScalerSteps):
    """The part of a `GradScaler` that one can watch."""

    @runs_eagerly
    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether the last `step` of an optimizer was made; also after `update`.

        Reads the device only if the optimizer decides by itself. A disabled scaler says True; of a step without gradients
        False.

        Raises:
            ScalerProtocolError: The optimizer had no step yet.
            SkippedStepsError: ``max_skipped`` were skipped in a row, and this is the host read by which that is known.
        """
        if not self._enabled:
            return True
        steps = self._history.seen(optimizer, "stepped()")
        news, made = steps.unread, bool(steps.last_was_made())
        if news:
            self._check_skipped(optimizer, steps.in_a_row(), None)
        return made

    @property
    def explanation(self) -> NonFiniteReport | None:
        """The op that made a step overflow, of a scaler with ``on_overflow="explain"``; None if none is known."""
        explainer = self._on_overflow
        return explainer.explanation if isinstance(explainer, OverflowExplainer) else None

    @runs_eagerly
    def found_inf(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Give the verdict of the last `step` of an optimizer: float32, of no dimension, 0 if all was finite. No host read.

        Of a step without gradients it is 0, and so it is always if the scaler is disabled.

        Raises:
            ScalerProtocolError: The optimizer had no step yet.
        """
        found = self._history.seen(optimizer, "found_inf()").found if self._enabled else None
        return torch.zeros((), device=self._scale_or_one().device) if found is None else found

    @runs_eagerly
    def steps_taken(self, optimizer: torch.optim.Optimizer) -> int:
        """Count the steps of an optimizer that were made. Reads the device only if the optimizer decides by itself."""
        return self._history.of(optimizer).taken()

    @runs_eagerly
    def skipped_in_a_row(self, optimizer: torch.optim.Optimizer) -> int:
        """Count the steps of an optimizer that were skipped since the last one that was made, likewise."""
        return self._history.of(optimizer).in_a_row()

    @runs_eagerly
    def nonfinite(self, optimizer: torch.optim.Optimizer) -> tuple[NonFinite, ...]:
        """List the parameters whose gradients were not finite at the last `step`; empty if it was made, or if unknown.

        Unknown they are where something has made all gradients NaN between `unscale_` and `step`, as PyTorch's
        ``clip_grad_norm_`` does for a NaN; the scaler's own leaves them as they are.

        Gradients are counted when a step is skipped, so this works after ``zero_grad`` too. After a step that the
        device decided on they are counted now: call it before ``zero_grad``. Reads the device.

        Raises:
            ScalerProtocolError: The optimizer had no step yet.
        """
        if not self._enabled:
            return ()
        steps = self._history.seen(optimizer, "nonfinite()")
        if steps.last_was_made():
            return ()
        if steps.overflow is None:
            then = [(gradient(), version) for gradient, version in steps.probe]
            if all(gradient is not None for gradient, _ in then) and are_same(then, versions_of(optimizer, most=1)):
                steps.overflow = self._overflow(optimizer, steps.in_a_row(), count(parameters_of(optimizer)))
            else:
                why = "the device decided on the step, and its gradients are gone; ask before zero_grad()"
                steps.overflow = self._overflow(optimizer, steps.in_a_row(), None, why)
        return steps.overflow.parameters

    def name_parameters(self, names: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Say what parameters are called in `nonfinite`, in errors and in the log.

        Without it they have the names that the optimizer was given, else those in the modules that are alive.

        Args:
            names: A module, a mapping from names to parameters, or pairs of name and parameter.

        Raises:
            ScalingError: It is something else.
        """
        pairs = names.named_parameters() if isinstance(names, nn.Module) else names
        listed = list(pairs.items() if isinstance(pairs, Mapping) else pairs)
        for pair in listed:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
                msg = (
                    "name_parameters takes a module, a mapping, or pairs of name and parameter, such as "
                    f"model.named_parameters(); got something with a {type(pair).__name__} in it."
                )
                raise ScalingError(msg)
        self._names.update({name: weakref.ref(parameter) for name, parameter in listed})
