"""The recorder: writes down every op of a thread while it is open, forward and backward, with its casts.

An op of the policy's list is one record, whatever runs inside of it, with the casts in front of it. Any other op is a record
where it runs. Nothing is changed and no tensor is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mezzo.decision import CastPolicy
from mezzo.report.numbers import Numbers
from mezzo.torch.casting import ELIGIBLE
from mezzo.torch.eager import runs_eagerly
from mezzo.torch.shadowing.shadow import Shadow
from mezzo.torch.watch_mode import WatchMode, unwatched

from .call_sites import in_compiled_function
from .listed_ops import Listed, RuleHere, listed_now, region_now
from .numerics import measure_all
from .op_facts import OpFacts, changes_dtype, facts_of, is_float, is_pending, tensors_of, written_by
from .op_places import OpPlaces, Place
from .origins import Origin, Origins
from .seen_ops import Operand, SeenOp, operand, shape_of

__all__ = ["Recorder"]

_OFF = "autocast off"
_NOT_LISTED = "not listed"


class Recorder(WatchMode):
    """Records ops.

    Args:
        limit: How many records to keep; of others only their number.
        numerics: Whether to measure results.
        shadow: A run in float32 beside the real one; None for none.

    Attributes:
        seen: The ops in the order of time.
        left_out: How many came after the limit.
        faults: What could not be looked at, and why.
        compiled: Whether functions were called that `torch.compile` has compiled; under a mode they run as eager code.
    """

    def __init__(self, *, limit: int, numerics: bool = False, shadow: Shadow | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[SeenOp] = []
        self.left_out = 0
        self.faults: dict[str, str] = {}
        self._limit = limit
        self._numerics = numerics
        self._shadow = shadow
        self._errors: dict[int, float | None] = {}  # of the last kernel's results
        self.compiled = False
        self._places = OpPlaces()
        self._origins = Origins()
        self._codes: set[int] = set()

    @runs_eagerly
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op, and write down what it did."""
        kwargs = kwargs or {}
        ready = None if self._shadow is None else self._shadow.before(func, args, kwargs)
        result = func(*args, **kwargs)
        with unwatched():
            try:
                if self._shadow is not None and ready is not None:
                    self._errors = _by_result(result, self._shadow.follow(func, args, kwargs, result, ready))
            except Exception as error:  # noqa: BLE001 - the program must not fail because somebody looks on; a note says it
                self._fault(f"the float32 run of {facts_of(func).name}", error)
            try:
                self._look(func, args, kwargs, result)
            except Exception as error:  # noqa: BLE001 - as above
                self._fault(facts_of(func).name, error)
        return result

    def _fault(self, what: str, error: Exception) -> None:
        self.faults.setdefault(what, f"{type(error).__name__}: {error}")

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        facts = facts_of(func)
        results = tensors_of((result,))
        if not facts.is_recorded:
            if facts.gives_memory:
                for tensor in results:
                    self._origins.set(tensor, Origin(-1))
            self._places.note_view(facts.name)
            return
        listed = listed_now()
        if listed is not None and listed.is_ruled:
            self._inside(listed, facts, args, results)
        else:
            self._by_itself(listed, facts, args, kwargs, results)

    def forget(self) -> None:
        """Drop all but the records."""
        self._places, self._origins, self._shadow, self._errors = OpPlaces(), Origins(), None, {}

    # An op of the list

    def _inside(self, listed: Listed, facts: OpFacts, args: tuple[Any, ...], results: list[Tensor]) -> None:
        place = self._places.place_of(listed, self)
        self._places.note(place, listed.spec.name)
        if changes_dtype(facts, args, results):
            source, made = args[0], results[0]
            listed.is_cast(source, made.dtype)
            self._origins.set(made, self._cast_origin(source, self._producer(source)))
            return
        listed.notes[self, "seen as"] = facts.name
        for tensor in (*results, *written_by(facts, args, {})):
            self._origins.set(tensor, Origin(len(self.seen)))

    def ends(self, listed: Listed, result: Any) -> None:
        """Write down an op of the list."""
        here = listed.here
        if here is None:
            return
        try:
            with unwatched():
                self._write_listed(listed, here, tensors_of((result,)))
        except Exception as error:  # noqa: BLE001 - as above
            self._fault(listed.spec.name, error)

    def _write_listed(self, listed: Listed, here: RuleHere, results: list[Tensor]) -> None:
        place = self._places.place_of(listed, self)
        op, rule = listed.spec.name, here.rule
        reason = f"rule of {op} in the policy {here.policy!r}"
        if place.phase == "backward":
            reason += f"; {_in_backward(place)}"
        seen = SeenOp(op, str(rule), reason, place)
        seen.seen_as = listed.notes.get((self, "seen as"), op)
        pairs = zip(listed.tensors, listed.cast_to, strict=True)
        seen.operands = [self._listed_operand(tensor, cast_to, here) for tensor, cast_to in pairs]
        for tensor in results:
            self._origins.set(tensor, Origin(len(self.seen)))
        self._write(seen, here, results)

    def _listed_operand(self, tensor: Tensor, cast_to: torch.dtype | None, here: RuleHere) -> Operand:
        kept = False
        if cast_to is None and here.rule is CastPolicy.LOWER_PRECISION_FP and tensor.dtype is not here.low:
            # A weight whose cast was made before in this region. Nothing else could have come without a cast.
            kept = (
                tensor.dtype in ELIGIBLE and tensor.is_leaf and tensor.device.type == here.device and tensor.dim() > 0
            )
        return operand(tensor, here.low if kept else cast_to, self._origins.of(tensor), kept=kept)

    # Any other op

    def _by_itself(
        self,
        listed: Listed | None,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[Tensor],
    ) -> None:
        place = self._places.now()
        self._places.note(place, facts.name)
        tensors = tensors_of((*args, *kwargs.values()))
        first = next(iter((*tensors, *results)), None)
        here = None if first is None else region_now(first.device.type)
        rule, reason = _rule_of(listed, place, here, is_cast=changes_dtype(facts, args, results))
        seen = SeenOp(facts.name, rule, reason, place)
        seen.operands = [operand(tensor, None, self._origins.of(tensor)) for tensor in tensors]
        seen.scalars = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, int | float))
        origin = Origin(len(self.seen))
        if rule == "cast" and results:
            source = args[1] if facts.writes and len(args) > 1 else args[0]
            origin = self._cast_origin(source, len(self.seen))
        for tensor in (*results, *written_by(facts, args, kwargs)):
            self._origins.set(tensor, origin)
        if first is not None:
            seen.device = first.device.type
        self._write(seen, here, results)

    def _cast_origin(self, source: Tensor, index: int) -> Origin:
        return Origin(index, self._producer(source), source.data_ptr())

    def _producer(self, tensor: Tensor) -> int:
        origin = self._origins.of(tensor)
        return -1 if origin is None else origin.place

    def _write(self, seen: SeenOp, here: RuleHere | None, results: list[Tensor]) -> None:
        if len(self.seen) >= self._limit:
            self.left_out += 1
            return
        if not self.compiled and id(seen.place.site.code) not in self._codes:
            self._codes.add(id(seen.place.site.code))
            self.compiled = in_compiled_function()
        seen.results = [(tensor.dtype, shape_of(tensor)) for tensor in results]
        if here is not None:
            seen.low, seen.policy, seen.device = here.low, here.policy, here.device
        if self._numerics and not is_pending(seen.seen_as):
            seen.numbers = self._numbers(seen.place, results)
        self.seen.append(seen)

    def _numbers(self, place: Place, results: list[Tensor]) -> Numbers | None:
        floats = [tensor for tensor in results if is_float(tensor.dtype)]
        # Forward, what follows the result are statistics; backward, it is gradients as well.
        looked_at = floats if place.phase == "backward" else floats[:1]
        return measure_all(looked_at, [self._error(tensor) for tensor in looked_at])

    def _error(self, tensor: Tensor) -> float | None:
        error = self._errors.get(id(tensor))
        # Of an op of the list, the result may be a view of what was followed last.
        return self._shadow.error(tensor) if error is None and self._shadow is not None else error


def _by_result(result: Any, errors: list[float | None]) -> dict[int, float | None]:
    return {id(one): error for one, error in zip(tensors_of((result,)), errors, strict=True)}


def _rule_of(listed: Listed | None, place: Place, here: RuleHere | None, *, is_cast: bool) -> tuple[str, str]:
    """Give the rule of an op that is not on the list, and why."""
    if is_cast and place.phase != "backward":
        return "cast", f"repair of {listed.spec.name}" if listed is not None else "asked for by the program"
    if place.phase == "backward":
        return "cast" if is_cast else "backward", _in_backward(place)
    return (_OFF, "") if here is None else (_NOT_LISTED, "")


def _in_backward(place: Place) -> str:
    if place.backward_of:
        return f"backward of {place.backward_of}"
    return f"in {place.node}" if place.node else "begins the backward pass"
