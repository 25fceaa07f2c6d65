"""The search of ``mezzo run`` for what is not finite: it goes on when the script's training does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from mezzo.report.nonfinite import NonFiniteReport
from mezzo.torch.eager import runs_eagerly
from mezzo.torch.recording.listed_ops import listening
from mezzo.torch.recording.module_stack import ModuleNames, following_modules
from mezzo.torch.scaling.gradients import values_of, version_of
from mezzo.torch.scaling.nonfinite import count
from mezzo.torch.searching.checks import is_finite
from mezzo.torch.searching.search import Search
from mezzo.torch.watch_mode import close, open_mode, unwatched

from .run_rounds import Rounds, ScriptSearch

__all__ = ["NonFiniteSearch"]

_LAST = 8
"""How many of the ops before it are told."""


class _Bad(NamedTuple):
    """A parameter whose gradient is not finite."""

    name: str
    parameter: nn.Parameter
    gradient: Tensor

    @property
    def version(self) -> tuple[WeakIdRef, int]:
        return WeakIdRef(self.gradient), version_of(self.gradient)


class NonFiniteSearch:
    """Looks for the op that broke the training, and not for one whose step a gradient scaler has skipped.

    A scaler begins with a scale that is too large on purpose, so the first overflow of a backward pass is seldom a fault. So
    the search begins anew at each update of a scale, and at each step whose gradients are finite; in the end `Rounds` tells
    what to make of it. What a forward pass makes ends the search, as does what reaches a step. Used by one thread.

    Example:
        >>> search = NonFiniteSearch()
        >>> search.open()
        >>> search.close()
        >>> print(search.report())
        0 ops, all finite
    """

    def __init__(self) -> None:
        self._names = ModuleNames()
        self._search = _RoundSearch(self._names, self._after_update)
        self._open = ExitStack()
        self._rounds = Rounds()
        self._is_open = False
        self._last: NonFiniteReport | None = None
        # Gradients that were not finite when a round ended, and their versions. By weak references: a later gradient may
        # have the id and the version of one that is gone.
        self._old: set[tuple[WeakIdRef, int]] = set()

    def open(self) -> None:
        """Begin to look, as the innermost of all that watches the thread."""
        with ExitStack() as stack:
            self._names = stack.enter_context(following_modules())
            self._search = _RoundSearch(self._names, self._after_update)
            stack.enter_context(listening(self._search))
            open_mode(self._search)
            stack.callback(close, self._search)
            self._open = stack.pop_all()
        self._is_open = True

    def _after_update(self) -> None:
        if self._search.first is not None and self._last is None:
            self._end_round()

    def _end_round(self) -> None:
        """Take down what was found, and begin anew if a scaler may have answered it."""
        first = self._search.first
        bad = self._bad_parameters()
        if first is None or first.phase != "backward":
            self._last = self._report(bad)
            return
        new = [one for one in bad if one.version not in self._old]
        self._rounds.add(self._report(new), {WeakIdRef(one.parameter) for one in new})
        self._old = {one.version for one in bad}
        self._search.begin_again([one.gradient for one in bad])

    def after_step(self, optimizer: torch.optim.Optimizer, *, may_close: bool) -> None:
        """See whether what was found has reached a step of an optimizer.

        Args:
            optimizer: It has made a step.
            may_close: Whether this is the innermost of all that watches, so that it can end.
        """
        if not self._is_open or (self._search.first is None and not self._rounds.is_pending):
            return
        with unwatched():
            self._judge(optimizer)
        if self._last is not None and may_close:
            self.close()

    def _judge(self, optimizer: torch.optim.Optimizer) -> None:
        if self._last is not None:
            return
        stepped = [one for group in optimizer.param_groups for one in group["params"]]
        finite = all(one.grad is None or is_finite(values_of(one.grad)) for one in stepped)
        if not finite and _is_skipped(optimizer):
            return  # the update of the scale follows
        if self._search.first is not None:
            if finite:
                self._end_round()
            else:
                self._last = self._report(self._bad_parameters())
        if finite:
            # A master is stepped in place of the model's parameter (`mezzo.torch.prepare`).
            self._rounds.made_step(
                {WeakIdRef(each) for one in stepped for each in (one, getattr(one, "model_param", one))}
            )

    def close(self) -> None:
        """End. Called twice, it does nothing more."""
        if not self._is_open:
            return
        self._is_open = False
        self._open.close()
        if self._last is None and self._search.first is not None:
            with unwatched():
                self._end_round()
        self._search.forget()

    def _bad_parameters(self) -> list[_Bad]:
        named = self._names.named_parameters()
        having = [_Bad(name, one, one.grad) for name, one in named if one.grad is not None]
        return [one for one in having if not is_finite(values_of(one.gradient))]

    def _report(self, bad: list[_Bad]) -> NonFiniteReport:
        names = {id(one.parameter): one.name for one in bad}
        parameters = count([one.parameter for one in bad]).read(names) if bad else ()
        return NonFiniteReport(self._search.first, tuple(map(str, parameters)), self._search.ops)

    def report(self, ended: str = "") -> ScriptSearch:
        """Say what was found.

        Args:
            ended: By what the script ended, if it failed.

        Returns:
            What lasts: what was made by a forward pass or has reached a step, or the last of the backward passes that no
            step followed.
        """
        search, last = self._search, self._last
        notes = [f"{op} could not be looked at: {why}" for op, why in search.faults.items()]
        if search.masks:
            notes.insert(0, f"-Inf that the program writes on purpose was taken for a mask, {search.masks} times")
        found = (last.first, last.parameters) if last is not None else (None, ())
        return self._rounds.verdict(
            NonFiniteReport(*found, search.ops, tuple(notes)), lasts=last is not None, ended=ended
        )


class _RoundSearch(Search):
    """A search that tells when a gradient scaler has updated its scale, and can begin anew."""

    def __init__(self, names: ModuleNames, updated: Callable[[], None]) -> None:
        super().__init__(names, last=_LAST, raise_error=False)
        self._updated = updated

    @runs_eagerly
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is _UPDATE:
            try:
                with unwatched():
                    self._updated()
            except Exception as error:  # noqa: BLE001 - the script must not fail because somebody looks on; a note says it
                self.faults.setdefault("the gradients", f"{type(error).__name__}: {error}")
        return result

    def begin_again(self, bad: Iterable[Tensor]) -> None:
        """Look for another finding.

        Args:
            bad: What is known not to be finite, and is no finding when it goes into an op.
        """
        self.first = None
        self._memory.clear()
        for one in bad:
            self._memory.note(one)


_UPDATE = torch.ops.aten._amp_update_scale_.default


def _is_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether a scaler has told a fused optimizer to leave out the step."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and bool(found.item())
