"""`find_nonfinite`: names the first op whose result is not finite, forward or backward."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, Self

from torch import nn

from mezzo.errors import OptionError
from mezzo.report.nonfinite import NonFiniteOp, NonFiniteReport
from mezzo.torch.recording.listed_ops import listening
from mezzo.torch.recording.module_stack import following_modules
from mezzo.torch.scaling.gradients import values_of
from mezzo.torch.scaling.nonfinite import NonFinite, count
from mezzo.torch.watch_mode import close, open_mode, unwatched

from .checks import is_finite
from .search import Search

__all__ = ["find_nonfinite"]


class find_nonfinite:  # noqa: N801 - a verb: `with find_nonfinite() as found`
    """Find the first op whose result is NaN or Inf though what went in is finite.

    A context manager around any code: forward and backward passes, optimizer steps. It looks at every result, of this
    thread, and stops looking once it has found something. Values, gradients and random numbers are what they are
    without it.

    -Inf that the program writes to mask something out is no finding, nor is what comes of it; NaN from a row that is
    masked out altogether is one. NaN in data or parameters is one: the first op that it goes into is named.

    Args:
        model: A model, for the names of its modules and parameters; without it those are named after the modules that
            are called.
        last: How many of the ops before it to tell.
        raise_error: Raise `mezzo.errors.NonFiniteError` in the op, so that a debugger stops there and the traceback
            shows it.

    Attributes:
        first: A `mezzo.report.nonfinite.NonFiniteOp`; None if all was finite.
        parameters: The parameters whose gradients were not finite when the block ended, as `mezzo.torch.NonFinite`.
        report: Both as a `mezzo.report.nonfinite.NonFiniteReport`.

    Raises:
        OptionError: An argument has a wrong type.

    Example:
        >>> import torch, mezzo.torch
        >>> with mezzo.torch.find_nonfinite() as found:
        ...     with mezzo.torch.autocast("cpu", dtype=torch.float16):
        ...         scores = torch.full((2, 2), 300.0) @ torch.full((2, 2), 300.0)
        >>> found.first.op, found.first.kind, found.first.dtype
        ('aten::matmul', 'Inf', 'float16')
        >>> print(found.first.cause)
        in float32 the result is finite, up to 1.8e+05; float16 ends at 65504

    An op costs one more pass over its result, and some fifty microseconds. Each look is a host read: on an accelerator
    the ops run one after the other.
    """

    def __init__(self, model: nn.Module | None = None, *, last: int = 8, raise_error: bool = False) -> None:
        if model is not None and not isinstance(model, nn.Module):
            msg = f"find_nonfinite takes a model, got {type(model).__name__}: `with find_nonfinite(model) as found:`."
            raise OptionError(msg)
        if not isinstance(last, int) or isinstance(last, bool) or last < 0:
            msg = f"last is a number of ops, at least 0; got {last!r}."
            raise OptionError(msg)
        self._model = model
        self._last = last
        self._raise_error = raise_error
        self._search: Search | None = None
        self._open = ExitStack()
        self.parameters: tuple[NonFinite, ...] = ()

    def __enter__(self) -> Self:
        """Begin to look."""
        if self._search is not None and self._search.is_open:
            msg = "this find_nonfinite block is open already; make another for a block inside of it."
            raise OptionError(msg)
        with ExitStack() as stack:
            self._names = stack.enter_context(following_modules(self._model))
            search = Search(self._names, last=self._last, raise_error=self._raise_error)
            stack.enter_context(listening(search))
            open_mode(search)
            stack.callback(close, search)
            self._open = stack.pop_all()
        self._search, self.parameters = search, ()
        search.is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        """Stop; what the block raised comes through."""
        self._open.close()
        search = self._search
        if search is not None:
            search.is_open = False
            search.forget()
            with unwatched():
                self.parameters = self._bad_parameters()
        return False

    def pause(self) -> None:
        """Stop looking before the block ends."""
        if self._search is not None:
            self._search.is_paused = True

    @property
    def mode(self) -> object:
        """The dispatch mode of the open block; None outside."""
        search = self._search
        return search if search is not None and search.is_open else None

    def _bad_parameters(self) -> tuple[NonFinite, ...]:
        named = self._names.named_parameters()
        # Counting takes several times as long as the quick look.
        bad = [one for _, one in named if one.grad is not None and not is_finite(values_of(one.grad))]
        return count(bad).read({id(parameter): name for name, parameter in named}) if bad else ()

    @property
    def first(self) -> NonFiniteOp | None:
        """What was found; None so far."""
        return None if self._search is None else self._search.first

    @property
    def report(self) -> NonFiniteReport:
        """What was found, as a value."""
        search = self._search
        if search is None:
            return NonFiniteReport(None, (), 0)
        notes = [f"{op} could not be looked at: {why}" for op, why in search.faults.items()]
        notes += [f"{kind} cannot be looked at: {number} results" for kind, number in search.unseen.items()]
        if search.masks:
            notes.insert(0, f"-Inf that the program writes on purpose was taken for a mask, {search.masks} times")
        return NonFiniteReport(search.first, tuple(map(str, self.parameters)), search.ops, tuple(notes))

    def as_dict(self) -> dict[str, Any]:
        """Give the report as plain data that JSON can hold."""
        return self.report.as_dict()

    def __str__(self) -> str:
        return str(self.report)
