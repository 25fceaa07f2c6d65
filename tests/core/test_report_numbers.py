"""Numbers of tensors as data: frozen, hashable, and added up."""

from __future__ import annotations

import copy
import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.report.numbers import Loss, Numbers

FULL = Numbers(
    elements=10,
    max_abs=3.0,
    min_abs=0.5,
    nan=1,
    inf=2,
    losses={"float16": Loss(0.1, 0.2, 0.3), "bfloat16": Loss()},
    exponents={1: 2, -1: 3},
    error=0.25,
)


@st.composite
def numbers(draw: st.DrawFn) -> Numbers:
    exponents = draw(st.dictionaries(st.integers(-5, 5), st.integers(1, 20), max_size=4))
    zeros, nan, inf = (draw(st.integers(0, 5)) for _ in range(3))
    # Sixteenths are added and weighed without rounding.
    share = st.integers(0, 16).map(lambda part: part / 16)
    return Numbers(
        elements=sum(exponents.values()) + zeros + nan + inf,
        max_abs=2.0 ** max(exponents) if exponents else 0.0,
        min_abs=2.0 ** min(exponents) if exponents else 0.0,
        nan=nan,
        inf=inf,
        losses={"float16": Loss(draw(share), draw(share), draw(share))},
        exponents=exponents,
        error=draw(st.none() | share),
    )


@pytest.mark.parametrize("change", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_is_equal_and_has_the_same_hash(change: object) -> None:
    twin = change(FULL)  # type: ignore[operator]
    assert twin == FULL
    assert hash(twin) == hash(FULL)
    assert twin.losses == FULL.losses


def test_the_order_in_which_exponents_came_does_not_count() -> None:
    one, other = (Numbers(2, 2.0, 1.0, exponents=dict(pairs)) for pairs in ([(0, 1), (1, 1)], [(1, 1), (0, 1)]))
    assert one == other
    assert hash(one) == hash(other)
    assert [*one.exponents] == [*other.exponents] == [0, 1]


def test_nothing_of_it_can_be_changed() -> None:
    given_exponents = {0: 1}
    made = Numbers(1, 1.0, 1.0, exponents=given_exponents)
    given_exponents[5] = 1
    assert dict(made.exponents) == {0: 1}
    for change in (
        lambda: made.exponents.__setitem__(0, 2),  # type: ignore[attr-defined]
        lambda: made.losses.__setitem__("float16", Loss()),  # type: ignore[attr-defined]
        lambda: setattr(made, "nan", 3),
        lambda: setattr(Loss(), "overflow", 1.0),
    ):
        with pytest.raises(AttributeError, match=r"__setitem__|cannot assign to field"):
            change()


def test_zeros_are_what_is_left() -> None:
    assert FULL.zeros == 2
    assert not FULL.finite
    assert Numbers(1, 1.0, 1.0).finite


def test_its_data_goes_through_json_and_back() -> None:
    data = json.loads(json.dumps(FULL.as_dict(), allow_nan=False))
    assert data == FULL.as_dict()
    assert data["losses"]["float16"] == {"overflow": 0.1, "underflow": 0.2, "subnormal": 0.3}
    assert data["exponents"] == {"-1": 3, "1": 2}
    back = Numbers(
        **{
            **data,
            "losses": {dtype: Loss(**loss) for dtype, loss in data["losses"].items()},
            "exponents": {int(exponent): count for exponent, count in data["exponents"].items()},
        }
    )
    assert back == FULL


def test_merging_nothing_gives_an_empty_tensors_numbers() -> None:
    assert Numbers.merge([]) == Numbers(0, 0.0, 0.0)


@given(numbers())
def test_merging_one_gives_it_back(one: Numbers) -> None:
    if one.elements:  # shares of nothing are 0
        assert Numbers.merge([one]) == one


@given(st.lists(numbers(), max_size=4))
def test_merging_adds_counts_and_weighs_shares(many: list[Numbers]) -> None:
    whole = Numbers.merge(iter(many))
    assert whole.elements == sum(one.elements for one in many)
    assert whole.zeros == sum(one.zeros for one in many)
    assert whole.max_abs == max((one.max_abs for one in many), default=0.0)
    assert whole.min_abs == min((one.min_abs for one in many if one.min_abs), default=0.0)
    assert (whole.error is None) == all(one.error is None for one in many)
    if many:
        lost = sum(one.elements * one.losses["float16"].underflow for one in many)
        # One division rounds.
        assert math.isclose(whole.losses["float16"].underflow * whole.elements, lost, rel_tol=1e-12)


@given(st.lists(numbers(), min_size=2, max_size=5), st.integers(1, 4))
def test_merging_in_parts_gives_the_same(many: list[Numbers], cut: int) -> None:
    whole, parts = Numbers.merge(many), Numbers.merge([Numbers.merge(many[:cut]), Numbers.merge(many[cut:])])
    assert (parts.elements, parts.exponents, parts.error) == (whole.elements, whole.exponents, whole.error)
    assert (parts.max_abs, parts.min_abs, parts.nan, parts.inf) == (whole.max_abs, whole.min_abs, whole.nan, whole.inf)
    if whole.elements:
        got, wanted = (one.losses["float16"] for one in (parts, whole))
        # Two divisions round.
        assert math.isclose(got.overflow, wanted.overflow, rel_tol=1e-12, abs_tol=1e-15)


def test_shares_are_of_those_that_have_them() -> None:
    merged = Numbers.merge([Numbers(4, 1.0, 1.0), Numbers(2, 1.0, 1.0, losses={"float16": Loss(subnormal=0.5)})])
    assert merged.losses == {"float16": Loss(subnormal=0.5)}
