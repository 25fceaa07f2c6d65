"""The report: records, what they add up to, and the data."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.report import Cast, DotCount, Finding, OpRecord, Region, Report, Residuals, SourceLine, Totals

from .reports import SIZES, few, record, records, reports

# What records add up to


@few
@given(st.lists(records(), max_size=8))
def test_the_totals_are_the_sums_over_the_records(some: list[OpRecord]) -> None:
    totals = Totals.of(some)
    pairs = [
        (came, used, math.prod(shape))
        for record in some
        for came, used, shape in zip(record.came, record.used, record.shapes_in, strict=True)
        if came != used
    ]
    assert totals.ops == len(some) == sum(totals.rules.values())
    assert totals.casts == len(pairs)
    assert totals.bytes_read == sum(math.ceil(SIZES[came] * elements) for came, _, elements in pairs)
    assert totals.bytes_written == sum(math.ceil(SIZES[used] * elements) for _, used, elements in pairs)
    assert sum(dot.count for dot in totals.dots) == sum(record.dot for record in some)
    assert sum(dot.runs for dot in totals.dots) == sum(record.times or 1 for record in some if record.dot)


@few
@given(st.lists(records(), max_size=6), st.lists(records(), max_size=6))
def test_the_totals_of_two_lists_add_up_to_those_of_both(first: list[OpRecord], second: list[OpRecord]) -> None:
    one, two, both = Totals.of(first), Totals.of(second), Totals.of(first + second)
    for name in ("ops", "changed", "casts", "bytes_read", "bytes_written"):
        assert getattr(both, name) == getattr(one, name) + getattr(two, name)
    dots = {(dot.used, dot.gave): dot.count for dot in both.dots}
    for dtypes, count in dots.items():
        assert count == sum(dot.count for part in (one, two) for dot in part.dots if (dot.used, dot.gave) == dtypes)


@few
@given(st.lists(records(), max_size=8))
def test_dots_are_listed_once_per_dtypes_and_the_most_frequent_come_first(some: list[OpRecord]) -> None:
    dots = Totals.of(some).dots
    assert len({(dot.used, dot.gave) for dot in dots}) == len(dots)
    assert [dot.count for dot in dots] == sorted((dot.count for dot in dots), reverse=True)


# Data


@few
@given(reports())
def test_the_data_can_be_written_as_json_and_read_back(report: Report) -> None:
    data = report.as_dict()
    assert json.loads(json.dumps(data)) == data
    assert json.loads(json.dumps(report.rows())) == report.rows()
    assert data["totals"]["casts"] == sum(row["casts"] for row in report.rows())
    assert data["totals"]["cast_bytes_read"] + data["totals"]["cast_bytes_written"] == sum(
        row["cast_bytes"] for row in report.rows()
    )
    assert [op for region in data["regions"] for op in region["ops"]] == [
        {name: value for name, value in row.items() if name != "region"} for row in report.rows()
    ]


@few
@given(reports())
def test_a_report_can_be_hashed_and_compared(report: Report) -> None:
    again = replace(report)
    assert again == report
    assert hash(again) == hash(report)


def test_a_report_is_a_value() -> None:
    region = Region("loss", {"dtype": "bfloat16"})
    with pytest.raises(AttributeError):
        region.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        region.settings["dtype"] = "float16"  # type: ignore[index]


def test_records_and_findings_can_be_pickled() -> None:
    record = OpRecord(
        "exp", "fp32", source=SourceLine("net.py", 1), came=("float32",), used=("float32",), shapes_in=((2,),)
    )
    assert pickle.loads(pickle.dumps(record)) == record
    finding = Finding("kind", "message")
    assert pickle.loads(pickle.dumps(finding)) == finding


# Filters


@given(
    reports(),
    st.sampled_from(["add", "exp"]),
    st.sampled_from(["fp32", "promote"]),
    st.sampled_from(["bfloat16", "bool"]),
)
def test_a_filter_keeps_what_meets_all_conditions(report: Report, op: str, rule: str, dtype: str) -> None:
    kept = report.where(op=op, rule=rule, dtype=dtype).records
    assert kept == tuple(
        record
        for record in report.records
        if record.op == op and record.rule == rule and dtype in record.used + record.gave
    )


@few
@given(reports())
def test_the_parts_of_a_yes_or_no_filter_are_the_whole(report: Report) -> None:
    for condition in ("dot", "changed"):
        yes, no = (report.where(**{condition: answer}) for answer in (True, False))
        assert len(yes.records) + len(no.records) == len(report.records)


@few
@given(reports())
def test_text_is_looked_for_in_path_source_and_reason(report: Report) -> None:
    assert all("scan" in record.path for record in report.where(path="scan").records)
    assert all(record.source and record.source.line == 3 for record in report.where(source="net.py:3").records)
    assert all(record.reason == "disabled()" for record in report.where(reason="disabled").records)
    assert {region.name for region in report.where(region="loss").regions} <= {"loss"}


def test_a_filter_keeps_the_findings_at_the_lines_of_what_it_keeps() -> None:
    here, there = SourceLine("net.py", 1), SourceLine("net.py", 2)
    ops = tuple(OpRecord("exp", "fp32", source=line) for line in (here, there))
    findings = tuple(Finding("kind", "message", source=line) for line in (here, there))
    report = Report("loss", "jax", (Region("loss", {}, ops, findings),))
    assert report.where(source="net.py:1").warnings == findings[:1]
    assert report.where(op="exp").warnings == findings


# Single values


def test_a_record_checks_that_its_operands_are_told_apart_the_same_way_everywhere() -> None:
    with pytest.raises(ValueError, match="'add' has 1 dtypes that came, 0 that were used and 0 shapes"):
        OpRecord("add", "promote", came=("float32",))
    with pytest.raises(ValueError, match="'add' has 1 dtypes and 0 shapes of results"):
        OpRecord("add", "promote", gave=("float32",))


def test_a_size_known_by_name_only_counts_as_one() -> None:
    one = record("exp", "bfloat16", "float32", "float32", shapes_in=(("batch", 8),))
    assert one.casts == (Cast(0, "bfloat16", "float32", 8),)


@pytest.mark.parametrize(
    ("traced_in", "traced_out", "changed"),
    [
        ((), (), False),
        (("float32",), ("float32",), True),
        (("bfloat16",), ("bfloat16",), False),
        ((), ("float32",), True),
    ],
)
def test_changed_is_what_has_other_dtypes_than_without_autocast(
    traced_in: tuple[str, ...], traced_out: tuple[str, ...], changed: bool
) -> None:
    one = record("add", "bfloat16", "bfloat16", "bfloat16", traced_in=traced_in, traced_out=traced_out)
    assert one.changed is changed


def test_findings_that_say_the_same_of_the_same_place_are_counted() -> None:
    here, there = Finding("a", "b", source=SourceLine("f", 1)), Finding("a", "b", source=SourceLine("f", 2))
    merged = Finding.merge([here, there, here, replace(here, count=3)])
    assert merged == (replace(here, count=5), there)
    assert str(merged[0]) == "f:1: b (5 times)"


def test_residuals_say_how_much_or_why_not() -> None:
    assert str(Residuals(0, 0)) == "0 B, without autocast 0 B"
    assert str(Residuals(None, None, "because")) == "not known: because"


def test_a_dot_count_says_how_often_it_runs_if_that_is_another_number() -> None:
    assert str(DotCount(("float32",) * 2, ("float32",), 2, 2)) == "float32 x float32 -> float32: 2"
