"""`explain`: what mixed precision did to a program while it ran: op by op, with module, line, rule, dtypes and casts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from threading import get_ident
from types import TracebackType
from typing import Any, Literal, Self

from torch import nn

from mezzo.errors import OptionError
from mezzo.report import Finding, Region, Report
from mezzo.torch.casting import dtype_name
from mezzo.torch.linting.findings import findings_of
from mezzo.torch.linting.prepared import prepared_names
from mezzo.torch.shadowing.shadow import Shadow
from mezzo.torch.watch_mode import close, open_mode

from .listed_ops import listening
from .module_stack import ModuleNames, following_modules
from .op_places import rank_here
from .recorder import Recorder
from .seen_ops import SeenOp, recorded

__all__ = ["explain"]

_FUSED = ("aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention")
_COMPILED = (
    "torch.compile: PyTorch runs compiled functions as eager code while ops are watched. The records are those of the eager "
    "program; what the compiler fuses, and casts that it leaves out, cannot be seen."
)
_FUSED_NOTE = "one kernel of PyTorch's does all of a fused layer, so the ops inside cannot be seen: "


class explain:  # noqa: N801 - a verb, as autocast is a noun: it is called as a function
    """Explain what mixed precision does to a model, or to any code.

    Called, it runs a model or function once, as it is, and gives the report. As a context manager it watches the code of
    its block: forward and backward passes, and optimizer steps, of this thread. Values, dtypes, gradients, random numbers
    and the lifetime of tensors are what they are without it.

    Args:
        model_or_fn: What to call; may be left out for the context manager. A module also gives the names of modules.
        numerics: Whether to measure each result: largest and smallest magnitude, what float16 and bfloat16 would lose, a
            histogram of exponents.
        shadow: Whether to carry a float32 run beside the real one, op by op, and tell how far each result is from it.
            Needs the memory of it, and implies ``numerics``.
        limit: How many records to keep; of ops after them only the number is told.
        model: A model whose names are wanted, if it is not ``model_or_fn``.

    Attributes:
        report: The `mezzo.report.Report`, so far if the block still runs.

    Raises:
        OptionError: Something is called that is not callable, or an option has a wrong value.

    Ops that run in autograd's own threads belong to the thread whose backward pass it is. Of other threads nothing is seen.

    Example:
        >>> import torch, mezzo.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
        >>> def step(x):
        ...     with mezzo.torch.autocast("cpu", dtype=torch.bfloat16, policy="unified"):
        ...         return model(x).sum()
        >>> report = mezzo.torch.explain(step, model=model)(torch.ones(2, 4))
        >>> for record in report.records:
        ...     print(record.path, record.op, record.rule, record.used, record.gave, len(record.casts))
        ('0',) aten::linear lower_precision_fp ('bfloat16', 'bfloat16', 'bfloat16') ('bfloat16',) 3
        ('1',) aten::softmax.int fp32_set_opt_dtype ('float32',) ('float32',) 1
        () aten::sum fp32_set_opt_dtype ('float32',) ('float32',) 0
        >>> with mezzo.torch.explain(model=model) as explained:
        ...     step(torch.ones(2, 4)).backward()
        >>> len(explained.report.where(path="0").records) > 1
        True
    """

    def __init__(
        self,
        model_or_fn: Callable[..., Any] | None = None,
        *,
        numerics: bool = False,
        shadow: bool = False,
        limit: int = 100_000,
        model: nn.Module | None = None,
    ) -> None:
        if model_or_fn is not None and not callable(model_or_fn):
            msg = (
                f"explain takes a model or a function, got {type(model_or_fn).__name__}: explain(model)(inputs), or "
                "`with explain() as explained:` around any code."
            )
            raise OptionError(msg)
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            msg = f"limit is a number of records, at least 1; got {limit!r}."
            raise OptionError(msg)
        self._called = model_or_fn
        self._model = model if model is not None else model_or_fn if isinstance(model_or_fn, nn.Module) else None
        self._numerics = numerics or shadow
        self._with_shadow = shadow
        self._limit = limit
        self._watches: list[tuple[int, _Watch]] = []
        self._last: _Watch | None = None

    def __call__(self, *inputs: Any, **kwargs: Any) -> Report:
        """Run the model or function, and report.

        Args:
            inputs: For it.
            kwargs: For it.

        Returns:
            The report. What was returned is dropped; use the context manager if you need it.

        Raises:
            OptionError: There is nothing to call. Whatever is raised by what is called comes through.
        """
        if self._called is None:
            msg = "explain() was given nothing to call: explain(model)(inputs), or use it as a context manager."
            raise OptionError(msg)
        with self:
            self._called(*inputs, **kwargs)
        return self.report

    def __enter__(self) -> Self:
        """Begin to watch."""
        watch = _Watch(self._model, self._limit, numerics=self._numerics, shadow=self._with_shadow)
        watch.open()
        self._watches.append((get_ident(), watch))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        """Stop; what the block raised comes through."""
        mine = next((one for one in reversed(self._watches) if one[0] == get_ident()), None)
        if mine is None:
            msg = "this explain block was entered in another thread; leave it there, where its mode is open."
            raise OptionError(msg)
        self._watches.remove(mine)
        self._last = mine[1]
        self._last.close()
        return False

    @property
    def report(self) -> Report:
        """The report of the block: of the last one if it has been entered several times."""
        watch = self._watches[-1][1] if self._watches else self._last
        if watch is None:
            msg = "explain has watched nothing yet: enter the block, or call it, before asking for the report."
            raise OptionError(msg)
        return watch.report(self._title())

    def _title(self) -> str:
        called = self._called
        if called is None:
            return "block"
        return str(getattr(called, "__name__", type(called).__name__))


class _Watch:
    """One block that is watched."""

    def __init__(self, model: nn.Module | None, limit: int, *, numerics: bool, shadow: bool) -> None:
        self._model = model
        self._recorder = Recorder(limit=limit, numerics=numerics, shadow=Shadow() if shadow else None)
        self._names = ModuleNames()
        self._open = ExitStack()

    def open(self) -> None:
        """Begin."""
        with ExitStack() as stack:
            self._names = stack.enter_context(following_modules(self._model))
            stack.enter_context(listening(self._recorder))
            open_mode(self._recorder)
            stack.callback(close, self._recorder)
            self._open = stack.pop_all()

    def close(self) -> None:
        """End."""
        self._open.close()
        self._recorder.forget()

    def report(self, title: str) -> Report:
        """Make the report of what was seen so far."""
        seen = self._recorder.seen
        rank = rank_here()
        ops = [recorded(one, index, self._names, rank) for index, one in enumerate(seen)]
        notes, found = self._notes(seen), []
        try:
            found = [*findings_of(ops, mastered=frozenset(prepared_names(self._names.models)))]
        except Exception as error:  # noqa: BLE001 - a rule that fails must not cost the records
            notes.append(f"findings could not be looked for: {type(error).__name__}: {error}")
        findings = Finding.merge(found)
        region = Region(title, _settings(seen, rank), tuple(op.record for op in ops), findings)
        return Report(title, "torch", (region,) if ops else (), tuple(notes))

    def _notes(self, seen: list[SeenOp]) -> list[str]:
        recorder, notes = self._recorder, []
        if not seen:
            notes.append("no op ran in this thread")
        elif all(one.low is None for one in seen):
            notes.append("autocast was off at every op")
        if recorder.left_out:
            notes.append(f"{recorder.left_out} ops after the first {len(seen)} have no record: explain(limit=...)")
        if recorder.compiled or self._names.compiled:
            notes.append(_COMPILED)
        fused = [one.seen_as for one in seen if one.seen_as in _FUSED]
        if fused:
            notes.append(_FUSED_NOTE + ", ".join(f"{name} ({fused.count(name)})" for name in dict.fromkeys(fused)))
        notes += [f"{op} could not be looked at: {why}" for op, why in recorder.faults.items()]
        return notes


def _settings(seen: list[SeenOp], rank: int | None) -> dict[str, str]:
    lows = dict.fromkeys(dtype_name(one.low) for one in seen if one.low is not None)
    policies = dict.fromkeys(one.policy for one in seen if one.policy)
    devices = dict.fromkeys(one.device for one in seen if one.device)
    settings = {"dtype": ", ".join(lows) or "autocast off"}
    if policies:
        settings["policy"] = ", ".join(policies)
    settings["device"] = ", ".join(devices)
    if rank is not None:
        settings["rank"] = str(rank)
    return settings
