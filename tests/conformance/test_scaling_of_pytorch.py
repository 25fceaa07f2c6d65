"""The scale moves as in PyTorch's own scaler and kernel, where these have the rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo import LossScaling, ScaleState, Verdict

from .scale_sequences import SEQUENCES, ScaleSequence

torch = pytest.importorskip("torch", reason="compares with PyTorch, which is not installed")


@pytest.mark.parametrize("sequence", SEQUENCES, ids=[sequence.name for sequence in SEQUENCES])
def test_pytorchs_scaler_moves_so_where_the_table_says_it_does(sequence: ScaleSequence) -> None:
    from .torch_backend import drive_scaler

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
