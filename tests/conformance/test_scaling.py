"""The scale moves the same way in every framework and in the core."""

from __future__ import annotations

import pytest

from .backend import Backend
from .scale_sequences import SEQUENCES, ScaleSequence

each_sequence = pytest.mark.parametrize("sequence", SEQUENCES, ids=[sequence.name for sequence in SEQUENCES])


def test_the_table_is_whole() -> None:
    """So that a sequence is never compared with fewer scales than it has iterations."""
    assert len({sequence.name for sequence in SEQUENCES}) == len(SEQUENCES)
    for sequence in SEQUENCES:
        assert len(sequence.reached) == len(sequence.found) > 0, sequence.name


@each_sequence
def test_the_scale_moves_in_the_core_as_the_table_says(sequence: ScaleSequence) -> None:
    state = sequence.start or sequence.numbers.start()
    reached = []
    for verdict in sequence.verdicts:
        state = sequence.numbers.next(state, verdict)
        reached.append((state.scale, state.growth_tracker))
    assert tuple(reached) == sequence.reached


@each_sequence
def test_the_scale_moves_in_the_framework_as_the_table_says(backend: Backend, sequence: ScaleSequence) -> None:
    reached = backend.scales(sequence.numbers, sequence.verdicts, start=sequence.start)
    assert tuple(reached) == sequence.reached
