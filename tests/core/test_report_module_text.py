"""The text of a report of modules: sums, findings, tree, ops by module and line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.report import Finding, OpRecord, Region, Report, SourceLine
from mezzo.report.lines import percent
from mezzo.report.numbers import Loss, Numbers
from mezzo.report.text import report_text

from .module_reports import FULL, LOW, large, module_report, op
from .reports import few, reports


def of(*records: OpRecord) -> Report:
    return Report("Net", "torch", (Region("Net", {}, records),))


def facts(report: Report) -> dict[str, str]:
    """Give the lines of the summary by their names."""
    lines = str(report).split("\n\n", maxsplit=1)[0].splitlines()[1:]
    return {line[2:13].strip(): line[13:] for line in lines}


@few
@given(reports(), st.integers(70, 120))
def test_no_line_is_longer_than_asked(report: Report, width: int) -> None:
    report = replace(report, framework="torch")
    for text in (report_text(report, width=width), report.table(width=width)):
        assert all(len(line) <= width for line in text.splitlines())


def test_no_line_with_numbers_is_longer_than_a_hundred() -> None:
    lines = str(module_report(2, large(), large())).splitlines()
    assert max(len(line) for line in lines) == 100
    assert [line for line in lines if line != line.rstrip()] == []


def test_the_summary_says_sums_findings_and_the_tree_and_then_come_the_ops() -> None:
    assert str(module_report(3)).splitlines()[:26] == [
        "Net: bfloat16, policy default, device cpu",
        "  dots       6  bfloat16 x bfloat16 -> bfloat16",
        "  casts      12, reading 6.0 KiB and writing 5.2 KiB",
        "  results    8.0 KiB: 5.0 KiB float32, 3.0 KiB bfloat16",
        "  ops        22: 13 not listed, 6 fp32, 3 lower_precision_fp",
        "  bfloat16   3 linear; 9 others",
        "  float32    3 layer_norm, 3 softmax; 4 others",
        "  phases     16 forward, 6 backward",
        "",
        "warnings (1)",
        "  ! layers.0.attn: nets/model.py:14 (forward): softmax [runs] in float32",
        "    > set_precision(model, {'layers.*.attn': 'bf16'})",
        "",
        "modules                            ops  casts      moved    results     low",
        "(whole)                             22     12   11.2 KiB    8.0 KiB   54.5%",
        "  layers                            21     12   11.2 KiB    7.5 KiB   57.1%",
        "    0 .. 2, each                     7      4    3.8 KiB    2.5 KiB   57.1%",
        "      norm                           1      1      768 B      512 B      0%",
        "      attn                           6      3    3.0 KiB    2.0 KiB   66.7%",
        "        qkv                          2      2    2.2 KiB      512 B    100%",
        "",
        "       op                       rule                operands (came>used, ~ kept cast) -> results",
        "layers.0.norm  nets/model.py:11",
        "       layer_norm               fp32                bf16>f32 f32 -> f32",
        "layers.0.attn.qkv  nets/model.py:12",
        "       linear                   lower_precision_fp  f32>bf16 weight:f32>bf16 -> bf16",
    ]
    assert str(module_report(3)).endswith("\nnote: a [note]")


def test_numbers_are_said_of_each_op_each_module_and_the_whole() -> None:
    gradients = Numbers(128, 0.5, 1e-8, nan=1, losses={"float16": Loss(underflow=0.75)})
    report = module_report(1, large(), gradients)
    summary = facts(report)
    assert summary["forward"] == "abs 1e-09 .. 7e+04, float16: 25% overflow, 12.5% to 0, error 0.02"
    assert summary["backward"] == "abs 1e-08 .. 0.5, 2 NaN, float16: 75% to 0"
    assert summary["overflow"] == "25% in float16: layer_norm in layers.0.norm at nets/model.py:11"
    lines = str(report).splitlines()
    assert [line.split() for line in lines if line.strip().startswith(("modules ", "qkv"))] == [
        "modules ops casts moved results low max out max grad error".split(),
        "qkv 2 2 2.2 KiB 512 B 100% 7e+04 NaN 0.02".split(),
    ]
    where = lines.index("       linear                   lower_precision_fp  f32>bf16 weight:f32>bf16 -> bf16")
    assert lines[where + 1].strip() == "abs 1e-09 .. 7e+04, float16: 25% overflow, 12.5% to 0, error 0.02"


def test_the_first_nan_and_the_largest_error_are_named_with_their_op() -> None:
    def one(name: str, numbers: Numbers) -> OpRecord:
        return op(name, "fp32", "head", 7, ((LOW, FULL),), FULL, numbers=numbers)

    summary = facts(of(one("exp", Numbers(1, 1.0, 1.0, error=0.5)), one("log", Numbers(1, 0.0, 0.0, nan=1, error=0.1))))
    assert summary["not finite"] == "first, 1 NaN: log in head at nets/model.py:7"
    assert summary["error"] == "0.5: exp in head at nets/model.py:7"


def test_casts_that_were_kept_and_the_names_of_parameters_are_shown() -> None:
    line = op("linear", "lower_precision_fp", "head", 5, ((LOW, LOW), (FULL, LOW), (FULL, LOW)), kept=(2,),
              operands=("", "head.weight", "head.bias"))  # fmt: skip
    assert of(line).table().splitlines()[-1].split(maxsplit=2)[2] == "bf16 weight:f32>bf16 bias:f32~bf16 -> bf16"
    assert facts(of(line))["casts"] == "1, reading 1.0 KiB and writing 512 B"


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("rule of aten::linear in the policy 'default' on cpu", ""),
        ("recomputed by activation checkpointing", "  (recomputed by activation checkpointing)"),
    ],
)
def test_the_reason_is_shown_where_it_is_not_the_rule_of_the_table(reason: str, shown: str) -> None:
    line = of(op("exp", "fp32", "head", 5, ((LOW, FULL),), FULL, reason=reason)).table(width=120).splitlines()[-1]
    assert line == "       exp                      fp32                bf16>f32 -> f32" + shown


@pytest.mark.parametrize(
    ("dtypes", "more", "named"),
    [
        (((LOW, LOW),), {}, True),
        (((LOW, LOW), (FULL, FULL)), {}, False),
        (((LOW, FULL),), {}, False),
        (((LOW, LOW),), {"dot": True}, False),
        (((LOW, LOW),), {"numbers": Numbers(1, 1.0, 1.0)}, False),
    ],
)
def test_an_op_without_rule_is_only_named_unless_there_is_something_to_tell(
    dtypes: tuple[tuple[str, str], ...], more: dict[str, object], named: bool
) -> None:
    lines = of(op("add", "not listed", "head", 5, dtypes, **more)).table().splitlines()[2:]
    assert (lines == ["       not listed, bf16: add"]) is named
    assert all("add" in line or "abs" in line for line in lines)


def test_what_ran_in_the_backward_pass_is_only_named_unless_it_is_a_product_or_a_cast() -> None:
    more = {"phase": "backward", "reason": "backward of aten::linear"}
    lines = of(
        op("mm", "backward", "head", 5, ((LOW, LOW), (LOW, LOW)), dot=True, **more),
        op("sum", "backward", "head", 5, ((LOW, LOW),), **more),
        op("_to_copy", "cast", "head", 5, ((LOW, LOW),), FULL, **more),
    ).table()
    assert lines.splitlines()[1:] == [
        "head  nets/model.py:5  [backward]",
        "       mm                       backward            bf16 bf16 -> bf16  (backward of linear)",
        "       _to_copy                 cast                bf16 -> f32  (backward of linear)",
        "       backward, bf16: sum",
    ]


def test_names_of_ops_that_do_not_fit_into_a_line_go_on_in_the_next() -> None:
    names = [f"operation_{number}" for number in range(12)]
    report = of(*(op(name, "autocast off", "", 5, ((FULL, FULL),), FULL) for name in names))
    lines = report.table(width=80).splitlines()[2:]
    assert len(lines) == 3
    assert " ".join(line.strip() for line in lines) == f"autocast off, f32: {', '.join(names)}"
    assert report.table(width=80, rows=3).splitlines()[-1].startswith("... and 12 more ops")


def test_a_path_is_written_before_a_finding_that_does_not_say_it() -> None:
    findings = tuple(Finding("kind", message, path=("layers.*",)) for message in ("mul in 'layers.*'", "mul"))
    text = str(Report("Net", "torch", (Region("Net", {}, (), findings),)))
    assert [line for line in text.splitlines() if "!" in line] == ["  ! mul in 'layers.*'", "  ! layers.*: mul"]


def test_a_phase_a_rank_and_ops_without_a_place_are_told_in_the_heading() -> None:
    record = OpRecord("exp", "fp32", came=(LOW,), used=(FULL,), gave=(FULL,), shapes_in=((),), shapes_out=((),))
    marked = replace(record, phase="recomputation", rank=3, path=("net",), source=SourceLine("a.py", 4, "step"))
    lines = of(record, marked).table().splitlines()
    assert lines[1] == "(outside of modules)"
    assert lines[3] == "net  a.py:4 (step)  [recomputation]  rank 3"


def test_a_long_table_ends_with_how_many_ops_are_left_and_the_whole_can_be_had() -> None:
    report = module_report(30)
    assert str(report).splitlines()[-2] == "... and 161 more ops: print(report.table()) shows all"
    assert report.table(rows=2).splitlines()[1:] == [
        "layers.0.norm  nets/model.py:11",
        "       layer_norm               fp32                bf16>f32 f32 -> f32",
        "... and 210 more ops: print(report.table()) shows all",
    ]
    assert "more ops" not in report.table()


def test_many_findings_are_cut_where_the_table_is_and_advice_keeps_its_lines() -> None:
    many = tuple(Finding("kind", f"message {number}", "first\n    second") for number in range(25))
    report = Report("Net", "torch", (Region("Net", {}, (), many),))
    assert "  ... and 5 more: see report.warnings, or save the report" in str(report).splitlines()
    text = report_text(report).splitlines()
    assert text[-3:] == ["  ! message 24", "    > first", "    >     second"]
    assert text[4:6] == ["  ops        none", ""]


def test_levels_for_which_there_is_no_room_are_left_out_of_the_tree() -> None:
    records = tuple(
        op(
            "exp",
            "fp32",
            f"m{number}.x.y" if number % 2 else f"m{number}.x",
            number,
            ((LOW, FULL),) * (number + 1),
            FULL,
        )
        for number in range(38)
    )
    records += tuple(op("exp", "fp32", f"m0.{name}", 3, ((LOW, FULL),), FULL) for name in "abc")
    lines = str(of(*records)).splitlines()
    tree = lines[lines.index("") + 1 :][: lines[lines.index("") + 1 :].index("")]
    assert tree[-1] == "... 1 deeper level: see report.modules, or save the report as .html"
    assert len(tree) == 1 + 1 + 38 + 1


def test_ops_without_floats_have_no_line_and_several_regions_have_headings() -> None:
    whole = OpRecord("argmax", "not listed", came=("int64",), used=("int64",), shapes_in=((2,),))
    assert of(whole).table() == ""
    exp = op("exp", "fp32", "", 1, ((LOW, FULL),), FULL)
    report = Report("two", "torch", tuple(Region(name, {}, (exp,)) for name in ("a", "b")))
    assert [line for line in report.table().splitlines() if line.endswith(":")] == ["a:", "b:"]


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0%"), (1e-9, "<0.1%"), (0.001, "0.1%"), (0.5, "50%"), (0.999, "99.9%"), (0.99951, ">99.9%"), (1.0, "100%")],
)
def test_a_share_is_never_rounded_to_nothing_or_to_all(share: float, text: str) -> None:
    assert percent(share) == text


def test_without_a_run_in_float32_no_column_of_errors_is_there() -> None:
    plain = replace(large(), error=None)
    heads = [
        next(line.split()[-1] for line in str(module_report(2, numbers)).splitlines() if line.startswith("modules"))
        for numbers in (plain, large())
    ]
    assert heads == ["grad", "error"]


def test_what_an_optimizer_computes_is_said_without_losses() -> None:
    records = tuple(op("add", "x", "", 1, ((FULL, FULL),), FULL, phase=phase, numbers=large())
                    for phase in ("forward", "optimizer"))  # fmt: skip
    summary = facts(Report("Net", "torch", (Region("Net", records=records),)))
    assert "25% overflow" in summary["forward"]
    assert summary["optimizer"] == "abs 1e-09 .. 7e+04, error 0.02"
