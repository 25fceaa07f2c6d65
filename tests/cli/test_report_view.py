"""The report on a terminal: what is on it, that nothing is wider, and that no text of the report is taken for markup."""

from __future__ import annotations

import io
import re
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from mezzo.cli.report_view import show
from mezzo.report import Finding, OpRecord, Region, Report, Residuals, SourceLine
from mezzo.report.numbers import Loss, Numbers
from tests.core.module_reports import large, module_report
from tests.core.reports import reports


def shown(report: Report, *, width: int = 100, rows: int | None = 30) -> str:
    written = io.StringIO()
    show(report, Console(file=written, width=width), rows=rows)
    return written.getvalue()


def table(text: str, title: str) -> list[list[str]]:
    """Give the cells of the rows of a table, which ends with an empty line."""
    lines = text.splitlines()
    body = lines[lines.index(next(line for line in lines if line.startswith(title))) :]
    first = next(number for number, line in enumerate(body) if "───" in line) + 1
    cells = []
    for line in body[first:]:
        if not line.strip():
            break
        cells.append([cell for cell in line.split("  ") if cell.strip()])
    return [[cell.strip() for cell in row] for row in cells]


@settings(max_examples=10)
@given(reports(), st.sampled_from(["torch", "jax"]), st.sampled_from([60, 80, 120]))
def test_any_report_can_be_shown_and_nothing_is_wider_than_the_terminal(
    report: Report, framework: str, width: int
) -> None:
    text = shown(replace(report, framework=framework), width=width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "a note" in text


def test_the_panel_says_the_sums() -> None:
    text = shown(module_report(3))
    for line in (
        "Net: bfloat16, policy default, device cpu",
        "dots      6  bfloat16 x bfloat16 -> bfloat16",
        "casts     12, reading 6.0 KiB and writing 5.2 KiB",
        "results   5.0 KiB float32, 3.0 KiB bfloat16",
        "ops       22: 13 not listed, 6 fp32, 3 lower_precision_fp",
        "float32   3 layer_norm, 3 softmax; 4 others",
        "phases    16 forward, 6 backward",
    ):
        assert line in text


def test_a_finding_is_shown_with_its_place_and_its_advice() -> None:
    text = shown(module_report(1))
    lines = [line.strip() for line in text.splitlines()]
    at = lines.index("float32 memory  layers.0.attn at nets/model.py:14 (forward)")
    assert lines[at + 1 : at + 3] == ["softmax [runs] in float32", "set_precision(model, {'layers.*.attn': 'bf16'})"]


def test_text_in_brackets_is_text_and_no_style() -> None:
    record = OpRecord("[bold]op[/bold]", "[red]", path=("[link=x]m",), source=SourceLine("[i].py", 1))
    finding = Finding("[blue]kind", "[/] message", "[/bold] advice", path=("[a]",))
    region = Region("[name]", {"[set]": "[to]"}, (record,), (finding,), Residuals(None, None, "[why]"))
    text = shown(Report("[title]", "torch", (region,), ("[/note]",)))
    written = ("[bold]op[/bold]", "[red]", "[link=x]m", "[blue]kind", "[/] message", "[/bold] advice", "[a]", "[name]",
               "[set] [to]", "[title]", "[/note]", "[why]")  # fmt: skip
    assert [part for part in written if part not in text] == []


def test_modules_are_a_tree_in_the_order_of_time() -> None:
    rows = table(shown(module_report(3)), "modules")
    assert [row[0] for row in rows] == ["(whole)", "layers", "0 .. 2, each", "norm", "attn", "qkv"]
    assert rows[1] == ["layers", "21", "12", "11.2 KiB", "7.5 KiB", "57.1%"]
    assert "numbers, and what float16" not in shown(module_report(3))


def test_numbers_have_a_table_of_their_own_with_gradients_apart() -> None:
    gradients = Numbers(128, 0.5, 1e-8, nan=1, losses={"float16": Loss(underflow=0.75)})
    text = shown(module_report(2, large(), gradients), width=80)
    rows = {row[0]: row[1:] for row in table(text, "numbers, and what float16 would lose of them")}
    assert rows["qkv"] == ["7e+04", "25%", "12.5%", "NaN", "1e-08", "-", "75%", "0.02"]
    assert rows["norm"] == ["7e+04", "25%", "12.5%", "-", "-", "-", "-", "0.02"]


def test_without_a_run_in_float32_no_column_of_errors_is_there() -> None:
    assert " error" in shown(module_report(1, large()))
    assert "error" not in shown(module_report(1, replace(large(), error=None)))


def test_a_mask_is_not_red_and_hides_no_number() -> None:
    mask = Numbers(128, 3.0, 0.5, inf=60, masked=60)
    rows = {row[0]: row[1:] for row in table(shown(module_report(1, mask)), "numbers, and what float16")}
    assert rows["(whole)"][0] == "3"
    assert "60 Inf of masks" in shown(Report("n", "torch", (Region("n", records=(OpRecord("o", "r", numbers=mask),)),)))


def test_findings_of_what_was_not_watched_come_without_sums() -> None:
    text = shown(Report("net", "torch", (Region("net", findings=(Finding("eps lost", "1e-12 is 0", "eps=1e-6"),)),)))
    assert "eps lost" in text
    assert "none" not in text


def test_ops_are_shown_with_the_dtypes_they_ran_in_and_their_rules() -> None:
    rows = {row[0]: row[1:] for row in table(shown(module_report(3, large())), "ops, the most frequent first")}
    assert rows["linear"] == ["3", "3 bf16", "lower_precision_fp", "6", "768 B", "7e+04"]
    assert rows["mean"] == ["1", "1 f32", "not listed", "-", "512 B", "-"]


def test_what_is_left_out_is_counted_and_all_can_be_asked_for() -> None:
    records = tuple(OpRecord(f"op{number}", "fp32", path=(f"m{number}.a", "b")) for number in range(40))
    findings = tuple(Finding(f"kind{number}", "message") for number in range(40))
    report = Report("Net", "torch", (Region("Net", {}, records, findings),))
    text = shown(report, rows=10)
    assert "... and 30 more findings: see report.warnings" in text
    assert "... and 30 more ops: see report.by_op" in text
    assert "op9 " in text
    assert "op10" not in text
    assert "more" not in shown(report, rows=None)
    assert "op39" in shown(report, rows=None)


def test_a_report_without_regions_says_so() -> None:
    assert "nothing to report" in shown(Report("Net", "torch"))


def test_colors_change_nothing_of_the_text() -> None:
    written = io.StringIO()
    show(module_report(1, large()), Console(file=written, width=100, color_system="truecolor", force_terminal=True))
    codes = re.compile("\x1b\\[[0-9;]*m")
    assert codes.search(written.getvalue())
    assert codes.sub("", written.getvalue()) == shown(module_report(1, large()))
