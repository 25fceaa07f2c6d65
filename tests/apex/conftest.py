"""amp has one state for the process: each test here starts and ends without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mezzo.apex.amp import _amp_state, casts, registered


def end_amp() -> None:
    """Put the process into the state it had before the first ``amp.initialize``."""
    casts.stop()
    registered.put_back_registrations()
    registered.reopen()
    _amp_state.reset()


@pytest.fixture(autouse=True)
def _amp_ends(_autocast_state_stays: None) -> Iterator[None]:
    end_amp()
    yield
    end_amp()
