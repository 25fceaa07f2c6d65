"""What became of a scale: `ScaleHistory` takes a row down at each `GradScaler.update`, without waiting for the device.

The numbers stay on the device until somebody asks for them, or until a callback is due.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import astuple, fields
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mezzo.errors import OptionError
from mezzo.torch.eager import runs_eagerly

from .scale_recording import Recording, ScaleRow
from .verdicts import Verdicts

if TYPE_CHECKING:
    from os import PathLike

    from mezzo.torch.scaler import GradScaler

__all__ = ["ScaleHistory", "ScaleRow"]


class ScaleHistory(Recording):
    """Takes down the scale, skipped steps and gradient norms of a `GradScaler`, one row at each `update`.

    It watches from when it is made until `close`, or the end of a ``with`` block. The scaler holds it, so that it need not
    be kept for a callback. Nothing is read from the device until `rows`, `as_dict`, `plot`, `flush` or a callback. No number
    of the run changes. It is used in the scaler's thread.

    A copy or a pickle of the scaler has no history, and its ``state_dict`` says nothing of it: save `state_dict` of the
    history too. A disabled scaler has no iterations and gives no rows. Iterations that a CUDA graph captures or replays
    are not seen.

    Args:
        scaler: The scaler.
        keep: How many rows are kept, at least 1; of more the oldest are dropped.
        norms: Compute the norm of an optimizer's gradients at its `step` where nothing was clipped before: one more
            pass over the gradients. Without it there is a norm only where the scaler's ``clip_grad_norm_`` gave one, or
            `note_norm`. With DTensors it is a collective, so all ranks need a history or none.
        callback: Called as ``callback(tag, value, step)``, with a float and an int, such as TensorBoard's
            ``writer.add_scalar``; the writer itself will do. Tags are ``amp/scale``, ``amp/skipped`` (0 or 1), and
            ``amp/grad_norm`` where there is a norm.
        every: The callback hears of so many rows at a time, at least 1: one host read each time.
        tag: What tags begin with, in place of ``amp``.
        start: The step of the first row.

    Raises:
        OptionError: An argument is not allowed.

    Example:
        >>> import torch
        >>> from mezzo.torch import GradScaler
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> scaler = GradScaler("cpu", init_scale=1024.0)
        >>> history = ScaleHistory(scaler, norms=True)
        >>> for factor in (1.0, float("inf"), 1.0):
        ...     optimizer.zero_grad()
        ...     scaler.scale((weight * factor).sum()).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        >>> for row in history.rows():
        ...     print(row.step, row.scale, row.skipped, f"{row.norm:.2f}")
        0 1024.0 False 1.41
        1 1024.0 True inf
        2 512.0 False 1.41
    """

    def __init__(
        self,
        scaler: GradScaler,
        *,
        keep: int = 10_000,
        norms: bool = False,
        callback: Callable[[str, float, int], object] | Any = None,
        every: int = 50,
        tag: str = "amp",
        start: int = 0,
    ) -> None:
        if not isinstance(scaler, Verdicts):
            kind = f"{type(scaler).__module__}.{type(scaler).__qualname__}"
            msg = f"ScaleHistory watches a mezzo.torch.GradScaler, which takes the same arguments; got a {kind}."
            raise OptionError(msg)
        self._norms = bool(norms)
        self._callback = _checked_callback(callback)
        self._every = _whole("every", every, 1)
        self._tag = str(tag).rstrip("/")
        self._told = _whole("start", start, 0)
        self._begin(_whole("keep", keep, 1), (), start)
        self._scaler = weakref.ref(scaler)
        scaler._watched_by.append(self)

    # What one asks

    def rows(self) -> tuple[ScaleRow, ...]:
        """Give all rows that are kept, the oldest first. Reads the device once if there are new ones."""
        self._read()
        return tuple(self._rows)

    def as_dict(self) -> dict[str, list[Any]]:
        """Give the rows as columns of plain numbers: ``step``, ``scale``, ``skipped``, ``norm``. Reads as `rows`.

        A norm may be ``inf`` or ``nan``, which JSON has no words for.
        """
        columns = [field.name for field in fields(ScaleRow)]
        rows = self.rows()
        return {name: [getattr(row, name) for row in rows] for name in columns}

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the scale over the steps with a log2 axis, skipped steps marked, and norms below it if there are any.

        Args:
            path: The file, overwritten if it exists; its suffix says which format: ``.png``, ``.svg``, ``.pdf``.

        Raises:
            ModuleNotFoundError: Matplotlib is not installed.
            ValueError: Matplotlib knows no such format.
        """
        from .scale_picture import save_picture  # noqa: PLC0415 - it imports Matplotlib, an extra

        save_picture(self.rows(), path)

    @runs_eagerly
    def note_norm(self, norm: Tensor | float) -> None:
        """Say the norm of this iteration's gradients without the scale, where something else has taken it; no host read.

        The scaler's ``clip_grad_norm_`` says it by itself. Of several norms in an iteration the largest is taken down.

        Args:
            norm: A tensor of one element, on any device, or a number. A DTensor whose parts are yet to be added up is
                passed over: give ``norm.full_tensor()``.

        Raises:
            OptionError: It is a tensor of several elements, or no number.

        Example:
            >>> import torch
            >>> from mezzo.torch import GradScaler
            >>> scaler = GradScaler("cpu")
            >>> history = ScaleHistory(scaler)
            >>> loss = scaler.scale(torch.tensor(1.0))
            >>> history.note_norm(0.5)
            >>> scaler.update()
            >>> history.rows()[0].norm
            0.5
        """
        self._take_norm(norm if isinstance(norm, Tensor) else _number(norm))

    def flush(self) -> None:
        """Tell the callback of all rows that it has not heard of. Reads as `rows`."""
        self._read()
        for row in list(self._rows):
            if self._callback is None or row.step < self._told:
                continue
            # First, so that a callback that raises does not hear of the row again.
            self._told = row.step + 1
            self._callback(f"{self._tag}/scale", row.scale, row.step)
            self._callback(f"{self._tag}/skipped", float(row.skipped), row.step)
            if row.norm is not None:
                self._callback(f"{self._tag}/grad_norm", row.norm, row.step)

    def close(self) -> None:
        """Watch no longer, and `flush`; rows stay. Twice is as good as once."""
        scaler = self._scaler()
        if scaler is not None and self in scaler._watched_by:
            scaler._watched_by = [other for other in scaler._watched_by if other is not self]
        self.flush()

    def __enter__(self) -> ScaleHistory:
        """Give itself; it has watched since it was made."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Call `close`."""
        self.close()

    def __repr__(self) -> str:
        return f"<ScaleHistory: {len(self._rows) + len(self._unread)} rows, next step {self._next}>"

    # Saving and loading

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint needs to go on with this history: `as_dict`, and the next step. Reads as `rows`."""
        return {**self.as_dict(), "next_step": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the rows that `state_dict` gave in place of those here, and count on from there.

        Args:
            state_dict: The five entries. The callback hears of none of these rows.

        Raises:
            KeyError: An entry is missing.
        """
        columns = [state_dict[field.name] for field in fields(ScaleRow)]
        following = _whole("next_step", state_dict["next_step"], 0)
        rows = [ScaleRow(*row) for row in zip(*columns, strict=True)]
        self._begin(self._keep, rows, following)
        self._told = following

    def __getstate__(self) -> dict[str, Any]:
        """Give what a copy has: the rows. It watches nothing, as the copy of a scaler has no history."""
        return {"keep": self._keep, "rows": [astuple(row) for row in self.rows()], "next": self._next}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what a pickle held."""
        self._norms, self._callback, self._every, self._tag = False, None, 1, "amp"
        self._begin(state["keep"], [ScaleRow(*row) for row in state["rows"]], state["next"])
        self._told = self._next
        self._scaler = lambda: None

    def _tell_if_due(self) -> None:
        # Rows that are not kept cannot be told of.
        if self._callback is not None and self._next - self._told >= min(self._every, self._keep):
            self.flush()


def _number(norm: Any) -> float:
    if isinstance(norm, Real) and not isinstance(norm, bool):
        return float(norm)
    msg = f"note_norm takes a tensor of one element or a number; got {norm!r:.80}."
    raise OptionError(msg)


def _whole(name: str, given: Any, least: int) -> int:
    if isinstance(given, int) and not isinstance(given, bool) and given >= least:
        return given
    msg = f"{name} must be a whole number of at least {least}. Got {given!r}."
    raise OptionError(msg)


def _checked_callback(given: Any) -> Any:
    found = getattr(given, "add_scalar", given)
    if found is None or callable(found):
        return found
    msg = (
        "callback must be a function of a tag, a value and a step, or a writer that has such a method add_scalar. "
        f"Got {given!r:.80}."
    )
    raise OptionError(msg)
