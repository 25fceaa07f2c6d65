"""The search: looks at the result of every op, and stops at the first that is not finite though what went in is.

What comes in not finite already is told apart: a mask of -Inf that the program writes is meant so, and data or parameters
with NaN are the finding themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import NonFiniteError
from mezzo.report.nonfinite import EarlierOp, NonFiniteOp
from mezzo.torch.eager import runs_eagerly
from mezzo.torch.recording.listed_ops import Listed, listed_now, region_now
from mezzo.torch.recording.memory_places import place_of
from mezzo.torch.recording.module_stack import ModuleNames
from mezzo.torch.recording.op_facts import changes_dtype, facts_of, is_float, tensors_of, written_by
from mezzo.torch.recording.op_places import OpPlaces, Place, rank_here
from mezzo.torch.recording.seen_ops import dtype_of, shape_of
from mezzo.torch.watch_mode import WatchMode, unwatched

from .causes import Call, Cause, advice_for, cause_of
from .checks import FINITE, Counted, can_be_looked_at, count_exactly, is_finite, range_of
from .masks import is_mask
from .memory import KnownMemory

__all__ = ["Search"]

Before = dict[int, Counted]
"""By the identity of a tensor that an op changes in place what of it was not finite before."""

_OVERWRITES = frozenset(
    f"aten::{name}" for name in ("copy_", "fill_", "zero_", "set_", "resize_", "_foreach_copy_", "_foreach_zero_")
)
_ADDS = ("aten::add", "aten::add_")
_Earlier = tuple[str, Place, tuple[torch.dtype, ...], tuple[torch.dtype, ...]]


class Search(WatchMode):
    """Searches for the first op whose result is not finite.

    Args:
        names: The names of modules.
        last: How many earlier ops to tell.
        raise_error: Whether the op is to raise.
        found: Called with what was found; it may be several times in threads of autograd's.

    Attributes:
        is_open: Whether its block runs.
        is_paused: Whether it looks at nothing meanwhile.
        first: What was found; None so far.
        ops: How many results were looked at.
        masks: How many results had -Inf or other constants that the program writes on purpose.
        faults: What could not be looked at, and why.
        unseen: How many results of other kinds could not be looked at, by kind.
    """

    def __init__(
        self,
        names: ModuleNames,
        *,
        last: int,
        raise_error: bool,
        found: Callable[[NonFiniteOp], object] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_open = self.is_paused = False
        self.first: NonFiniteOp | None = None
        self.ops = 0
        self.masks = 0
        self.faults: dict[str, str] = {}
        self._names = names
        self._raise_error = raise_error
        self._found = found
        self._places = OpPlaces()
        self._last: deque[_Earlier] = deque(maxlen=last)
        self._memory = KnownMemory()
        self.unseen: dict[str, int] = {}

    def forget(self) -> None:
        """Drop all but what was found."""
        self._places = OpPlaces()
        self._memory.clear()
        self._last.clear()

    @runs_eagerly
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op, and look at its result."""
        kwargs = kwargs or {}
        if self.first is not None or self.is_paused:
            return func(*args, **kwargs)
        before = self._before(func, args)
        result = func(*args, **kwargs)
        try:
            with unwatched():
                self._look(func, args, kwargs, result, before)
        except NonFiniteError:
            raise
        except Exception as error:  # noqa: BLE001 - the program must not fail because somebody looks on; a note says it
            self.faults.setdefault(facts_of(func).name, f"{type(error).__name__}: {error}")
        return result

    def _before(self, func: Any, args: tuple[Any, ...]) -> Before:
        """Look at what an op is about to change in place, of which nothing can be told afterwards."""
        facts = facts_of(func)
        if not facts.writes or facts.is_random or facts.name in _OVERWRITES or not facts.is_recorded:
            return {}
        try:
            with unwatched():
                floats = [one for one in written_by(facts, args, {}) if is_float(one.dtype)]
                return {id(one): count_exactly(one) for one in floats if not is_finite(one)}
        except Exception as error:  # noqa: BLE001 - as below
            self.faults.setdefault(facts.name, f"{type(error).__name__}: {error}")
            return {}

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, before: Before) -> None:
        facts = facts_of(func)
        if not facts.is_recorded or facts.is_pending:
            if facts.gives_memory:
                for one in tensors_of((result,)):
                    self._memory.note(one)
            self._places.note_view(facts.name)
            return
        listed = listed_now()
        ruled = listed if listed is not None and listed.is_ruled else None
        place = self._places.now() if ruled is None else self._places.place_of(ruled, self)
        self._places.note(place, facts.name if ruled is None else ruled.spec.name)
        results = tensors_of((result,))
        if ruled is not None and changes_dtype(facts, args, results):
            ruled.is_cast(args[0], results[0].dtype)
        results += [one for one in written_by(facts, args, kwargs) if not any(one is known for known in results)]
        self.ops += 1
        bad = [one for one in results if is_float(one.dtype) and not self._is_finite(one)]
        if bad:
            self._look_closer(Call(func, facts, args, kwargs, ruled), place, bad[0], before)
        for one in results:
            if any(one is each for each in bad):
                self._memory.note(one)
            else:
                self._memory.is_finite_now(one)
        if ruled is None:
            dtypes = tuple(one.dtype for one in tensors_of((*args, *kwargs.values())))
            self._last.append((facts.name, place, dtypes, tuple(one.dtype for one in results)))

    def ends(self, listed: Listed, result: Any) -> None:
        """Remember an op of the list as one that ran, whatever ran inside."""
        if self.first is None and not self.is_paused:
            came = zip(listed.tensors, listed.cast_to, strict=True)
            used = tuple(cast_to or tensor.dtype for tensor, cast_to in came)
            gave = tuple(one.dtype for one in tensors_of((result,)))
            self._last.append((listed.spec.name, self._places.place_of(listed, self), used, gave))

    def _is_finite(self, tensor: Tensor) -> bool:
        if not can_be_looked_at(tensor):
            kind = type(tensor).__name__ if type(tensor) is not Tensor else f"tensors of the layout {tensor.layout}"
            self.unseen[kind] = self.unseen.get(kind, 0) + 1
        return is_finite(tensor)

    # Where a result is not finite

    def _look_closer(self, call: Call, place: Place, result: Tensor, before: Before) -> None:
        gave = count_exactly(result)
        written = {id(one) for one in written_by(call.facts, call.args, call.kwargs)}
        operands = [one for one in tensors_of((*call.args, *call.kwargs.values())) if is_float(one.dtype)]
        went_in = [before.get(id(one), FINITE) if id(one) in written else count_exactly(one) for one in operands]
        unseen = self._unseen(operands, went_in)
        if unseen is not None:
            self._tell(call, place, unseen, count_exactly(unseen), operands, came_in=True)
            return
        new_nan = gave.nan and not any(one.nan for one in went_in)
        new_inf = (gave.inf or gave.minus_inf) and not any(one.any for one in went_in)
        # A mask of -Inf that scores are added to makes no Inf.
        beside_mask = call.facts.name in _ADDS and gave.inf and not any(one.inf or one.nan for one in went_in)
        if new_nan or new_inf or beside_mask:
            if is_mask(call, result, gave):
                self.masks += 1
            else:
                self._tell(call, place, result, gave, operands)
                return

    def _unseen(self, operands: list[Tensor], went_in: list[Counted]) -> Tensor | None:
        """Find what came in with NaN or Inf that no op has made here: data or a parameter."""
        for tensor, counted in zip(operands, went_in, strict=True):
            if counted.any and not self._memory.has(tensor):
                if counted.nan or counted.inf:
                    return tensor
                self._memory.note(tensor)  # -Inf alone: a mask that was made before
                self.masks += 1
        return None

    def _tell(
        self, call: Call, place: Place, result: Tensor, gave: Counted, operands: list[Tensor], *, came_in: bool = False
    ) -> None:
        names, listed = self._names, call.listed
        # Of a checkpoint that is loaded nothing else tells where it goes.
        name_of = names.find_parameter if came_in else names.parameter_at
        ranges = [range_of(one, name_of(place_of(one)) or "") for one in operands]
        path = names.path(place.running)
        region = region_now(result.device.type)
        try:
            cause = cause_of(call, result, gave, ranges, place, came_in=came_in)
        except Exception as error:  # noqa: BLE001 - what was found must not be lost with the reason
            cause = Cause("unknown", f"its cause could not be looked for: {type(error).__name__}: {error}")
        rule = str(region.rule) if listed is not None and region is not None else self._rule(place, region)
        op = listed.spec.name if listed is not None else call.facts.name
        self.first = NonFiniteOp(
            kind=gave.kind,
            op=op,
            seen_as=call.facts.name,
            path=path,
            source=place.site.source,
            phase=place.phase,
            rule=f"{rule} in the policy {region.policy!r}" if listed is not None and region is not None else rule,
            dtype=dtype_of(result),
            shape=shape_of(result),
            nan=gave.nan,
            inf=gave.inf + gave.minus_inf,
            operands=tuple(ranges),
            cause=cause.text,
            cause_kind=cause.kind,
            advice=advice_for(cause, op, path, place, region),
            before=tuple(self._earlier(one) for one in self._last),
            rank=rank_here(),
        )
        if self._found is not None:
            self._found(self.first)
        if self._raise_error:
            raise NonFiniteError(str(self.first), self.first)

    def _rule(self, place: Place, region: Any) -> str:
        if place.phase == "backward":
            return f"backward of {place.backward_of}" if place.backward_of else f"in {place.node}"
        return "autocast off" if region is None else "not listed"

    def _earlier(self, one: _Earlier) -> EarlierOp:
        op, place, used, gave = one
        dtypes = tuple(map(dtype_of, used)), tuple(map(dtype_of, gave))
        return EarlierOp(op, self._names.path(place.running), place.site.source, place.phase, *dtypes)
