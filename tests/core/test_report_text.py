"""The report as text: within its width, like ops folded, what matters first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.report import Finding, OpRecord, Region, Report, Residuals, SourceLine
from mezzo.report.findings import in_bytes
from mezzo.report.records import itemsize
from mezzo.report.text import report_text, short

from .reports import few, record, reports


@few
@given(reports(), st.integers(60, 120))
def test_no_line_is_longer_than_asked(report: Report, width: int) -> None:
    for text in (report_text(report, width=width), report.table(width=width)):
        assert all(len(line) <= width for line in text.splitlines())
    assert all(len(line) <= 100 for line in str(report).splitlines())


@few
@given(reports())
def test_every_cast_op_with_floats_is_in_the_table(report: Report) -> None:
    table = report.table(width=200)
    for one in report.records:
        if one.floats and one.casts:
            assert one.op in table


def test_ops_of_a_line_that_are_alike_are_one_row_with_their_number() -> None:
    line = SourceLine("/src/net.py", 7, "loss")
    ops = (
        record("add", "bfloat16", "bfloat16", "bfloat16", source=line),
        record("exp", "bfloat16", "float32", "float32", source=line),
        record("add", "bfloat16", "bfloat16", "bfloat16", source=line, shapes_in=((5,),)),
    )
    lines = Report("loss", "jax", (Region("loss", {}, ops),)).table().splitlines()
    assert lines[1:] == [
        "src/net.py:7 (loss)",
        "   2 x add                      promote             bf16 -> bf16",
        "       exp                      promote             bf16>f32 -> f32",
    ]


def test_ops_that_run_as_without_autocast_are_named_in_one_row() -> None:
    same = {"traced_in": ("float32",), "traced_out": ("float32",)}
    ops = (
        *(record("add", "float32", "float32", "float32", **same) for _ in range(3)),
        record("exp", "float32", "float32", "float32", **same),
        record("mul", "float32", "float32", "float32", reason="disabled()", **same),
    )
    lines = Report("loss", "jax", (Region("loss", {}, ops),)).table().splitlines()
    assert lines[1:] == [
        "(no source line)",
        "       mul                      promote             f32 -> f32  (disabled())",
        "       as without autocast: 3 add, exp",
    ]


def test_ops_without_floats_and_calls_without_casts_have_no_row() -> None:
    ops = (record("iota", "int32", "int32", "int32"), record("jit", "float32", "float32", "float32", encloses=True))
    assert Report("loss", "jax", (Region("loss", {}, ops),)).table() == ""


def test_a_long_table_ends_with_how_much_is_left_and_the_whole_can_be_had() -> None:
    ops = tuple(record(f"op{number}", "bfloat16", "float32", "float32") for number in range(200))
    report = Report("loss", "jax", (Region("loss", {}, ops),))
    assert str(report).splitlines()[-1] == "... and 121 more lines: print(report.table()) shows all"
    assert "op199" in report.table()


def test_the_summary_says_dots_casts_memory_rules_and_then_the_warnings() -> None:
    dots = [
        OpRecord("dot_general", "lower_precision_fp", came=("float32",) * 2, used=("bfloat16",) * 2, gave=("bfloat16",),
                 shapes_in=((256, 2), (2, 256)), shapes_out=((256, 256),), dot=True, times=times)
        for times in (1, 12)
    ]  # fmt: skip
    finding = Finding(
        "float32 dot", "dot_general stays in float32: disabled()", "do it", SourceLine("net.py", 9, "loss"), count=2
    )
    settings = {"dtype": "bfloat16", "policy": "default", "carry": "fixpoint"}
    region = Region("loss", settings, tuple(dots), (finding,), Residuals(4096, 1024), 2)
    assert str(Report("step", "jax", (region,), ("look at it",))).splitlines()[:9] == [
        "loss (2 times): bfloat16, policy default, carry fixpoint",
        "  dots       2  bfloat16 x bfloat16 -> bfloat16, run 13 times",
        "  casts      4, reading 8.0 KiB and writing 4.0 KiB",
        "  residuals  1.0 KiB, without autocast 4.0 KiB (x 0.25)",
        "  ops        2, of which 2 changed: 2 lower_precision_fp",
        "",
        "warnings (1)",
        "  ! net.py:9 (loss): dot_general stays in float32: disabled() (2 times)",
        "    > do it",
    ]
    assert str(Report("step", "jax", (region,), ("look at it",))).endswith("\nnote: look at it")


def test_a_report_without_regions_says_so() -> None:
    assert str(Report("loss", "jax")) == "loss: nothing to report"


@pytest.mark.parametrize(
    ("dtype", "shortened", "size"),
    [
        ("float32", "f32", 4),
        ("bfloat16", "bf16", 2),
        ("float64", "f64", 8),
        ("int8", "i8", 1),
        ("uint16", "u16", 2),
        ("complex128", "c128", 16),
        ("float8_e5m2", "f8_e5m2", 1),
        ("float4_e2m1fn", "f4_e2m1fn", 0.5),
        ("bool", "bool", 1),
        ("key<fry>", "key<fry>", 0),
    ],
)
def test_dtypes_have_a_short_name_and_a_size(dtype: str, shortened: str, size: float) -> None:
    assert short(dtype) == shortened
    assert itemsize(dtype) == size


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**40, "5.0 TiB"), (2**60, "1048576.0 TiB")],
)
def test_bytes_are_said_in_the_unit_that_fits(number: int, text: str) -> None:
    assert in_bytes(number) == text
