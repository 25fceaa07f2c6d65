"""The scale moves the same way in every framework, in the core, and, where it has the rule, in PyTorch's own scaler."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo import LossScaling, ScaleState, Verdict

from .backend import Backend
from .scale_sequences import SEQUENCES, ScaleSequence
from .torch_backend import drive_scaler

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


# PyTorch's own


@each_sequence
def test_pytorchs_scaler_moves_so_where_the_table_says_it_does(sequence: ScaleSequence) -> None:
    numbers = sequence.numbers
    scaler = torch.amp.GradScaler(
        "cpu", numbers.init_scale, numbers.growth_factor, numbers.backoff_factor, numbers.growth_interval
    )
    reached = drive_scaler(scaler, sequence.verdicts, start=sequence.start)
    assert (tuple(reached) == sequence.reached) == sequence.as_pytorch


WITHOUT_BOUNDS = {"min_scale": 2.0**-126, "max_scale": None, "max_nan_backoffs": None}


@given(
    scale=st.floats(2.0**-100, 2.0**127, width=32),
    growth=st.floats(1.0, 1e3, exclude_min=True),
    backoff=st.floats(1e-3, 1.0, exclude_max=True),
    interval=st.integers(1, 4),
    verdicts=st.lists(st.sampled_from(Verdict), max_size=30),
)
def test_without_bounds_the_core_does_what_pytorchs_kernel_does_bit_for_bit(
    scale: float, growth: float, backoff: float, interval: int, verdicts: list[Verdict]
) -> None:
    numbers = LossScaling(scale, growth, backoff, interval, **WITHOUT_BOUNDS)
    state = numbers.start()
    theirs, tracker = torch.tensor(state.scale), torch.tensor(0, dtype=torch.int32)
    for verdict in verdicts:
        found_inf = torch.tensor(0.0 if verdict is Verdict.FINITE else 1.0)
        torch._amp_update_scale_(theirs, tracker, found_inf, growth, backoff, interval)
        state = numbers.next(state, verdict)
        if theirs.item() < 2.0**-126:
            # Here PyTorch loses the scale; mezzo has stopped, and from now on the two differ.
            assert state.scale == 2.0**-126
            return
        assert (state.scale, state.growth_tracker) == (theirs.item(), tracker.item())


@given(st.floats(2.0**-126, 3.4028234663852886e38))
def test_a_state_rounds_its_scale_as_pytorch_does(scale: float) -> None:
    assert ScaleState(scale).scale == torch.tensor(scale, dtype=torch.float32).item()
