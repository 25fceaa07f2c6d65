"""Which of several findings of a training is the one to tell: what lasts, and not what a gradient scaler has answered."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from mezzo.report.nonfinite import NonFiniteOp, NonFiniteReport

__all__ = ["Rounds", "ScriptSearch"]


@dataclass(frozen=True)
class ScriptSearch(NonFiniteReport):
    """What the search found in a whole script.

    Attributes:
        summary: What the text says in place of "all finite", where that is not all there is to say.

    Example:
        >>> print(ScriptSearch(None, (), 12, summary="12 ops ran before the script broke off"))
        12 ops ran before the script broke off
    """

    summary: str = ""

    def __str__(self) -> str:
        text = super().__str__()
        if self.first is not None or not self.summary:
            return text
        _, line, rest = text.partition("\n")
        return self.summary + line + rest

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain data that JSON can hold.

        Returns:
            What a `NonFiniteReport` gives, and ``summary``.
        """
        return {**super().as_dict(), "summary": self.summary}


@dataclass
class _Chain:
    """Rounds in which gradients of the same parameters were not finite, with no step of theirs in between."""

    parameters: set[Hashable]
    rounds: list[NonFiniteReport] = field(default_factory=list)


class Rounds:
    """The rounds of a training, each to an update of a scale or to a step, whose backward pass was not finite.

    A scaler answers such a round: it leaves out the step and lowers the scale. If a step with finite gradients follows, of
    an optimizer that has the parameters in question, the round was overcome.

    Example:
        >>> rounds = Rounds()
        >>> rounds.add(NonFiniteReport(None, (), 5), {1, 2})
        >>> rounds.is_pending
        True
        >>> rounds.made_step({2, 3})
        >>> rounds.is_pending
        False
    """

    def __init__(self) -> None:
        self._chains: list[_Chain] = []
        self._overcome: list[NonFiniteReport] = []

    @property
    def is_pending(self) -> bool:
        """Whether there are rounds that no step has followed yet."""
        return bool(self._chains)

    def add(self, report: NonFiniteReport, parameters: AbstractSet[Hashable]) -> None:
        """Take down a round.

        Args:
            report: What was found in it.
            parameters: What stands for the parameters whose gradients it made non-finite: equal for the same one, and for
                no other, also when it is gone. Without any, every step follows it.
        """
        chain = next((one for one in self._chains if _meet(one.parameters, parameters)), None)
        if chain is None:
            chain = _Chain(set())
            self._chains.append(chain)
        chain.parameters |= parameters
        chain.rounds.append(report)

    def made_step(self, parameters: AbstractSet[Hashable]) -> None:
        """Take down a step with finite gradients.

        Args:
            parameters: What stands for the optimizer's parameters.
        """
        for chain in [one for one in self._chains if _meet(one.parameters, parameters)]:
            self._chains.remove(chain)
            self._overcome += chain.rounds

    def verdict(self, last: NonFiniteReport, *, lasts: bool, ended: str = "") -> ScriptSearch:
        """Say what to tell of the whole script.

        Args:
            last: What the search says at the end, with the number of all ops.
            lasts: Whether its finding is none that a scaler could answer, or has reached a step.
            ended: By what the script ended, if it failed.

        Returns:
            The finding, or that there is none; what was overcome is a note.
        """
        notes = [*last.notes, *([_overcome_note(self._overcome)] if self._overcome else [])]
        first, parameters = (last.first, last.parameters) if lasts else (None, ())
        if not lasts and self._chains:
            # Of the longest the last: as the scale falls overflows end, and what the scale is no reason for stays.
            rounds = max(self._chains, key=lambda chain: len(chain.rounds)).rounds
            first, parameters = rounds[-1].first, rounds[-1].parameters
            notes.append(_pending_note(rounds))
        if ended:
            notes.append(f"the script ended with {ended}")
        found: dict[str, Any] = {"first": first, "parameters": parameters, "notes": tuple(notes)}
        summary = _summary(last.ops, ended, overcome=bool(self._overcome))
        return ScriptSearch(**{**vars(replace(last, **found)), "summary": summary})


def _meet(one: AbstractSet[Hashable], other: AbstractSet[Hashable]) -> bool:
    return not one or not other or not one.isdisjoint(other)


def _summary(ops: int, ended: str, *, overcome: bool) -> str:
    if ended:
        return f"{ops} ops ran before the script broke off; " + (
            "what was not finite did not last" if overcome else "their results were finite"
        )
    return f"{ops} ops, and nothing lasting that is not finite" if overcome else ""


def _passes(count: int) -> str:
    return "a backward pass was not finite" if count == 1 else f"{count} backward passes were not finite"


def _overcome_note(rounds: list[NonFiniteReport]) -> str:
    first = rounds[0].first
    where = f"; first {first.kind} in {_place(first)}" if first is not None else ""
    return (
        f"{_passes(len(rounds))}, and the training went on with finite gradients, as it does when a gradient scaler finds "
        f"its scale{where}"
    )


def _pending_note(rounds: list[NonFiniteReport]) -> str:
    last = rounds[-1].first
    same = sum(one.first is not None and last is not None and _key(one.first) == _key(last) for one in rounds)
    others = f", of which {same} began with this op" if same < len(rounds) else ""
    return f"{_passes(len(rounds))}{others}; no step with finite gradients came after {'it' if len(rounds) == 1 else 'them'}"


def _key(op: NonFiniteOp) -> tuple[object, ...]:
    return op.kind, op.op, op.path, op.source


def _place(op: NonFiniteOp) -> str:
    where = f" of {'/'.join(op.path)}" if op.path else ""
    return f"{op.op.removeprefix('aten::')}{where}" + (f" at {op.source}" if op.source else "")
