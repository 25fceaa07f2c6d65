"""What the host knows without waiting. On a GPU it looks some iterations later; here with tensors on the CPU."""

from __future__ import annotations

import pytest
import torch

from mezzo.torch.scaling.health import Health

GOOD, BAD = torch.tensor(0.0), torch.tensor(1.0)
NAN, INF, UNKNOWN = torch.tensor([1.0, 0, 0]), torch.tensor([1.0, 1, 0]), torch.tensor([0.0, 0, 1])


def test_the_bound_falls_with_each_backoff_that_may_have_been() -> None:
    health = Health(64.0)
    for _ in range(3):
        health.fell(0.5)
    assert health.at_least == pytest.approx(8.0, rel=2e-3)
    assert health.at_least < 8.0


def test_what_was_sent_corrects_the_bound_by_what_may_have_happened_since() -> None:
    health = Health(64.0)
    for _ in range(3):
        health.fell(0.5)  # it may have; in truth it stays at 64
        health.send(GOOD, None, torch.tensor(64.0), learn=True)
    health.look(lag=2)
    assert health.at_least == pytest.approx(16.0, rel=2e-3)
    health.look(lag=1)
    assert health.at_least == pytest.approx(32.0, rel=2e-3)
    health.look(lag=0)
    assert health.at_least == 64.0


def test_a_scale_that_is_read_counts_at_once_and_notes_under_way_still_do() -> None:
    health = Health(64.0)
    health.fell(0.5)
    health.send(BAD, None, torch.tensor(32.0), learn=True)
    health.fell(0.5)
    health.know(16.0)
    assert health.at_least == 16.0
    health.fell(0.5)
    health.look(lag=0)
    assert health.at_least == pytest.approx(8.0, rel=2e-3)
    assert health.skips == 1


def test_nothing_is_learnt_before_its_time() -> None:
    health = Health(1.0)
    for number in range(6):
        health.send(BAD, None, torch.tensor(1.0), learn=True)
        told = health.look(lag=4)
        assert (health.skips, told) == ((0, 0) if number < 4 else (number - 3, 1))


def test_a_note_about_the_scale_alone_teaches_nothing_else() -> None:
    health = Health(1.0)
    health.send(BAD, None, torch.tensor(0.5), learn=False)
    assert health.look(lag=0) == 0
    assert (health.skips, health.at_least) == (0, 0.5)


def test_somebody_elses_scale_may_be_anything() -> None:
    health = Health(1024.0)
    health.forget()
    assert health.at_least == 0.0


@pytest.mark.parametrize(
    ("run", "length"),
    [
        ([NAN, NAN, NAN], 3),
        ([UNKNOWN, NAN, NAN], 3),
        ([None, NAN], 2),
        ([NAN, None], 0),
        ([INF, NAN, NAN], 2),
        ([NAN, INF], 0),
        ([NAN, UNKNOWN], 0),
        ([torch.tensor([0.0, 0, 0])], 0),
    ],
)
def test_nan_alone_is_counted_back_from_a_last_one_that_is_known(run: list[torch.Tensor | None], length: int) -> None:
    health = Health(1.0)
    for flags in run:
        health.learn(found=True, flags=flags)
    assert health.nan_backoffs() == length
    assert health.nan_backoffs() == length, "it does not forget"
    health.learn(found=False, flags=None)
    assert (health.nan_backoffs(), health.skips, health.settled) == (0, 0, True)


def test_flags_travel_with_the_note() -> None:
    health = Health(1.0)
    health.send(BAD, NAN, torch.tensor(1.0), learn=True)
    health.send(BAD, NAN, torch.tensor(1.0), learn=True)
    health.look(lag=0)
    assert health.nan_backoffs() == 2
