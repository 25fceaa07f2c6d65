"""A scale's history has one row for each `update`: the scale, whether a step was left out, and the norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.errors import OptionError, ScalingError
from mezzo.torch import GradScaler, step_merged
from mezzo.torch.scaling.scale_history import ScaleHistory, ScaleRow

from .runs import INF, NAN, Script, assert_equal

NUMBERS = {"init_scale": 64.0, "growth_interval": 2}


def a_weight(*numbers: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(numbers or (1.0, 1.0, 1.0, 1.0)))


def iterate(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    weight: Tensor,
    factor: float,
    between: Callable[[], Any] | None = None,
) -> None:
    """One iteration; each gradient is the factor."""
    optimizer.zero_grad()
    scaler.scale((weight * factor).sum()).backward()
    if between is not None:
        between()
    scaler.step(optimizer)
    scaler.update()


OPTIMIZERS = {
    "for-loop": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    "foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
    "fused adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


@each_optimizer
def test_a_row_has_the_scale_of_its_own_loss(make: Callable[..., torch.optim.Optimizer]) -> None:
    weight = a_weight()
    optimizer, scaler = make([weight]), GradScaler("cpu", **NUMBERS)
    history = ScaleHistory(scaler)
    for factor in (1.0, 1.0, INF, NAN, 1.0):
        iterate(scaler, optimizer, weight, factor)
    assert history.rows() == (
        ScaleRow(0, 64.0, False, None),
        ScaleRow(1, 64.0, False, None),
        ScaleRow(2, 128.0, True, None),
        ScaleRow(3, 64.0, True, None),
        ScaleRow(4, 32.0, False, None),
    )
    iterate(scaler, optimizer, weight, 1.0)
    assert history.rows()[5] == ScaleRow(5, 32.0, False, None)
    assert scaler.get_scale() == 64.0


@pytest.mark.parametrize("options", [{}, {"norms": True}], ids=["scale", "norms"])
@pytest.mark.parametrize("loop", ["for-loop", "foreach", "fused"])
def test_a_run_is_the_same_with_a_history(options: dict[str, Any], loop: str) -> None:
    script = Script(optimizer="adam", loop=loop, steps=60)
    histories = []

    def watch(step: int, scaler: GradScaler) -> GradScaler:
        if step == 0:
            histories.append(ScaleHistory(scaler, **options))
        return scaler

    plain, watched = script.run("mezzo"), script.run("mezzo", watch)
    assert_equal(plain, watched)
    rows = histories[0].rows()
    # The outcome has the scale after each step, the rows the one before.
    assert [row.scale for row in rows] == [2.0**16, *plain.scales[:-1]]
    fell = [after < before for before, after in zip([2.0**16, *plain.scales], plain.scales, strict=False)]
    assert [row.skipped for row in rows] == fell
    assert any(fell)


# Norms


@pytest.mark.parametrize("unscaled_before", [False, True])
@each_optimizer
def test_the_norm_of_the_scalers_clipping_is_taken_down(
    make: Callable[..., torch.optim.Optimizer], unscaled_before: bool
) -> None:
    weight = a_weight()
    optimizer, scaler = make([weight]), GradScaler("cpu", **NUMBERS)
    history = ScaleHistory(scaler)

    def clip() -> None:
        if unscaled_before:
            scaler.unscale_(optimizer)
        # What the caller does to the norm afterwards is not in the row.
        scaler.clip_grad_norm_([weight], 0.5).zero_()

    for factor in (3.0, INF, 4.0):
        iterate(scaler, optimizer, weight, factor, clip)
    iterate(scaler, optimizer, weight, 1.0)
    assert [row.norm for row in history.rows()] == [6.0, INF, 8.0, None]


@each_optimizer
def test_norms_are_computed_of_gradients_scaled_or_not(make: Callable[..., torch.optim.Optimizer]) -> None:
    weight = a_weight()
    optimizer, scaler = make([weight]), GradScaler("cpu", **NUMBERS)
    history = ScaleHistory(scaler, norms=True)
    iterate(scaler, optimizer, weight, 3.0)
    iterate(scaler, optimizer, weight, 3.0, lambda: scaler.unscale_(optimizer))
    iterate(scaler, optimizer, weight, NAN)
    norms = [row.norm for row in history.rows()]
    assert norms[:2] == [6.0, 6.0]
    assert norms[2] is not None
    assert math.isnan(norms[2])


def test_a_norm_is_not_computed_where_something_was_clipped() -> None:
    weight = a_weight()
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", **NUMBERS)
    history = ScaleHistory(scaler, norms=True)
    iterate(scaler, optimizer, weight, 3.0, lambda: scaler.clip_grad_norm_([weight], 0.5))
    assert history.rows()[0].norm == 6.0  # after clipping it is 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("unscaled_before", [False, True])
def test_a_computed_norm_fits_where_float16_does_not_hold_it(dtype: torch.dtype, unscaled_before: bool) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.0), GradScaler("cpu", init_scale=1.0)
    history = ScaleHistory(scaler, norms=True)
    between = (lambda: scaler.unscale_(optimizer)) if unscaled_before else None
    iterate(scaler, optimizer, weight, 49152.0, between)  # every dtype has it exactly, and float16 not its double
    assert history.rows() == (ScaleRow(0, 1.0, False, 98304.0),)


def test_a_norm_from_elsewhere_is_taken_down_once() -> None:
    weight = a_weight()
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", **NUMBERS)
    history = ScaleHistory(scaler, norms=True)

    def clip() -> None:
        scaler.unscale_(optimizer)
        history.note_norm(nn.utils.clip_grad_norm_([weight], 0.5))

    iterate(scaler, optimizer, weight, 3.0, clip)
    iterate(scaler, optimizer, weight, 1.0)
    assert [row.norm for row in history.rows()] == [6.0, 2.0]


def test_of_several_norms_in_an_iteration_the_largest_is_taken_down() -> None:
    first, second = a_weight(), a_weight()
    scaler = GradScaler("cpu", **NUMBERS)
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in (first, second)]
    clipped, computed = ScaleHistory(scaler), ScaleHistory(scaler, norms=True)
    for clip in (True, False):
        for optimizer, weight, factor in zip(optimizers, (first, second), (1.0, 3.0), strict=True):
            optimizer.zero_grad()
            scaler.scale((weight * factor).sum()).backward()
            if clip:
                scaler.clip_grad_norm_(optimizer, 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert [row.norm for row in clipped.rows()] == [6.0, None]
    assert [row.norm for row in computed.rows()] == [6.0, 6.0]


@pytest.mark.parametrize(
    ("norm", "text"),
    [
        (torch.ones(2), r"^note_norm takes a tensor of one element; got one of shape \(2,\)\.$"),
        ("1.0", r"^note_norm takes a tensor of one element or a number; got '1\.0'\.$"),
        (True, r"^note_norm takes a tensor of one element or a number; got True\.$"),
    ],
    ids=str,
)
def test_what_is_no_norm_is_refused(norm: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        ScaleHistory(GradScaler("cpu")).note_norm(norm)


# Uses of a scaler


def test_one_optimizer_that_skips_is_enough() -> None:
    first, second = a_weight(), a_weight()
    scaler = GradScaler("cpu", **NUMBERS)
    history = ScaleHistory(scaler)
    for factor in (1.0, INF):
        loss = scaler.scale(first.sum() + (second * factor).sum())
        loss.backward()
        for weight in (first, second):
            optimizer = torch.optim.SGD([weight], lr=0.1)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    assert [row.skipped for row in history.rows()] == [False, True]


def test_each_scaler_of_a_merged_step_has_its_own_scale_and_the_common_skip() -> None:
    weight = a_weight()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scalers = [GradScaler("cpu", init_scale=scale) for scale in (8.0, 64.0)]
    histories = [ScaleHistory(scaler, norms=True) for scaler in scalers]
    for factor in (1.0, INF, 1.0):
        optimizer.zero_grad()
        for scaler, times in zip(scalers, (1.0, factor), strict=True):
            with scaler.merge(optimizer):
                scaler.scale((weight * times).sum()).backward()
        step_merged(optimizer, scalers)
        for scaler in scalers:
            scaler.update()
    first, second = (history.rows() for history in histories)
    # The first one's loss was finite each time: its scale stays, though the step was left out.
    assert first == (ScaleRow(0, 8.0, False, 4.0), ScaleRow(1, 8.0, True, INF), ScaleRow(2, 8.0, False, 4.0))
    assert [(row.scale, row.skipped) for row in second] == [(64.0, False), (64.0, True), (32.0, False)]


def test_in_an_accumulation_the_scale_stays_and_each_update_has_a_row() -> None:
    weight, other = a_weight(), a_weight()
    head, body = torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([other], lr=0.1)
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=1)
    history = ScaleHistory(scaler)
    with scaler.accumulate():
        for factor in (1.0, INF):
            scaler.scale((weight * factor).sum() + other.sum()).backward()
            scaler.step(head)
            scaler.update()
            head.zero_grad()
    scaler.scale(other.sum()).backward()
    scaler.step(body)
    scaler.update()
    scaler.scale(other.sum())
    scaler.update()
    # What overflowed inside counts at the first update after it; in the last iteration nothing was stepped.
    expected = [(64.0, False), (64.0, True), (64.0, False), (32.0, False)]
    assert [(row.scale, row.skipped) for row in history.rows()] == expected


def test_gradients_that_were_looked_at_and_not_stepped_with_count() -> None:
    weight = a_weight()
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", **NUMBERS)
    history = ScaleHistory(scaler)
    for factor in (INF, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.update()
    assert [(row.scale, row.skipped) for row in history.rows()] == [(64.0, True), (32.0, False)]


def test_a_closure_that_overflows_is_a_skipped_step() -> None:
    weight = a_weight()
    optimizer, scaler = torch.optim.LBFGS([weight], max_iter=2), GradScaler("cpu", **NUMBERS)
    history = ScaleHistory(scaler, norms=True)
    for factor in (1.0, INF):

        def closure(factor: float = factor) -> Tensor:
            optimizer.zero_grad()
            loss = (weight * factor).square().sum()
            scaler.scale(loss).backward()
            return loss

        scaler.step(optimizer, closure)
        scaler.update()
    assert history.rows() == (ScaleRow(0, 64.0, False, None), ScaleRow(1, 64.0, True, None))


def test_a_scale_that_is_set_or_loaded_is_in_the_next_row() -> None:
    weight = a_weight()
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", **NUMBERS)
    history = ScaleHistory(scaler)
    iterate(scaler, optimizer, weight, 1.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 256.0})
    iterate(scaler, optimizer, weight, 1.0)
    scaler.update(16.0)
    with pytest.raises(ScalingError, match="new_scale must be finite"):
        scaler.update(0.0)  # no update, no row
    iterate(scaler, optimizer, weight, 1.0)
    assert [row.scale for row in history.rows()] == [64.0, 256.0, 512.0, 16.0]


def test_a_disabled_scaler_gives_no_rows() -> None:
    weight = a_weight()
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", enabled=False)
    told: list[Any] = []
    with ScaleHistory(scaler, norms=True, callback=lambda *what: told.append(what), every=1) as history:
        iterate(scaler, optimizer, weight, 1.0, lambda: scaler.clip_grad_norm_([weight], 1.0))
    assert history.rows() == ()
    assert told == []


def test_rows_may_be_read_in_the_midst_of_an_update() -> None:
    class Reading(GradScaler):
        def _move_scale(self) -> None:
            history.rows()
            super()._move_scale()

    weight = a_weight()
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), Reading("cpu", **NUMBERS)
    history = ScaleHistory(scaler)
    iterate(scaler, optimizer, weight, INF)
    for factor in (INF, 1.0):
        iterate(scaler, optimizer, weight, factor)
    assert [row.scale for row in history.rows()] == [64.0, 32.0, 16.0]


def test_it_goes_on_after_inference_mode() -> None:
    scaler = GradScaler("cpu", **NUMBERS)
    history = ScaleHistory(scaler)
    with torch.inference_mode():
        scaler.scale(torch.ones(()))
        scaler.update()
    scaler.update()
    assert [row.scale for row in history.rows()] == [64.0, 64.0]


# How much is kept, and who is watched


@pytest.mark.parametrize("read_at", [(), (700,), range(1000)], ids=["late", "once", "always"])
def test_the_last_rows_are_kept_whenever_they_are_read(read_at: Any) -> None:
    scaler = GradScaler("cpu")
    history = ScaleHistory(scaler, keep=300, start=5)
    scaler.scale(torch.ones(()))
    for step in range(1000):
        history.note_norm(step)
        scaler.update()
        if step in read_at:
            history.rows()
    rows = history.rows()
    assert [(row.step, row.norm) for row in rows] == [(step + 5, float(step)) for step in range(700, 1000)]
    # Blocks of 64 rows: six hold 300 rows wherever they begin.
    assert len(history._numbers._blocks) <= 6
    assert repr(history) == "<ScaleHistory: 300 rows, next step 1005>"


def test_a_history_watches_until_it_is_closed() -> None:
    weight = a_weight()
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", **NUMBERS)
    always = ScaleHistory(scaler)
    with ScaleHistory(scaler) as history:
        iterate(scaler, optimizer, weight, 1.0)
    history.close()
    iterate(scaler, optimizer, weight, 1.0)
    assert (len(history.rows()), len(always.rows())) == (1, 2)
    assert scaler._watched_by == [always]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep": 0}, r"^keep must be a whole number of at least 1\. Got 0\.$"),
        ({"every": 1.5}, r"^every must be a whole number of at least 1\. Got 1\.5\.$"),
        ({"start": True}, r"^start must be a whole number of at least 0\. Got True\.$"),
        ({"callback": 3}, r"^callback must be a function of a tag, a value and a step, or a writer .* Got 3\.$"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_refused_and_nothing_watches(options: dict[str, Any], text: str) -> None:
    scaler = GradScaler("cpu")
    with pytest.raises(OptionError, match=text):
        ScaleHistory(scaler, **options)
    assert scaler._watched_by == []


def test_pytorchs_own_scaler_is_refused() -> None:
    text = r"^ScaleHistory watches a mezzo\.torch\.GradScaler, .*; got a torch\.amp\.grad_scaler\.GradScaler\.$"
    with pytest.raises(OptionError, match=text):
        ScaleHistory(torch.amp.GradScaler("cpu"))  # type: ignore[arg-type]
