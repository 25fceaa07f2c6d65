"""The plots of a report's page, read off what the browser has drawn."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from .opened import Opened, numbers_in
from .sample import sample

if TYPE_CHECKING:
    from playwright.sync_api import Page

REPORT = sample()
RECORDS = REPORT.records


def exponents(phase: str) -> Counter[int]:
    found: Counter[int] = Counter()
    for record in RECORDS:
        if record.phase == phase and record.numbers:
            found.update(record.numbers.exponents)
    return found


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_histogram_has_a_bar_for_each_exponent_with_its_count(window: Page, phase: str) -> None:
    bars = numbers_in(window, f"#plot-exponents .bin.{phase}", "exponent", "count")
    assert len(bars) == len(exponents(phase)) > 2
    assert {int(exponent): int(count) for exponent, count in bars} == exponents(phase)


def test_a_bar_is_as_high_as_it_counts_and_stands_at_its_exponent(window: Page) -> None:
    script = """[...document.querySelectorAll('#plot-exponents .bin.backward')].map((bar) =>
        [Number(bar.dataset.exponent), Number(bar.dataset.count), bar.getBoundingClientRect().left,
         bar.getBoundingClientRect().height])"""
    bars = sorted(window.evaluate(script))
    assert [left for _, _, left, _ in bars] == sorted(left for _, _, left, _ in bars)
    heights = [height for _, count, _, height in sorted(bars, key=lambda bar: bar[1])]
    assert heights == sorted(heights)
    assert heights[0] > 0
    # float16 turns what is below 2**-24 into 0 (or rounds up to that): the shaded part ends where that bar begins.
    edges = window.evaluate(
        "[...document.querySelectorAll('#plot-exponents .zone')].map((zone) => zone.getBoundingClientRect().right)"
    )
    below = [left for exponent, _, left, _ in bars if exponent < -24]
    assert len(below) == len(bars)
    assert max(below) < edges[0]


def test_the_ranges_beneath_the_histogram_are_those_of_the_dtypes(window: Page) -> None:
    titles = window.locator("#plot-exponents .ruler title").all_text_contents()
    assert titles == [
        "float16: subnormal from 2^-24 to 2^-14",
        "float16: normal from 2^-14 to 2^16",
        "bfloat16: normal from 2^-126 to 2^128",
    ]
    # Where the picture ends bfloat16's range goes on: its subnormal numbers would be left of it.
    script = "[...document.querySelectorAll('#plot-exponents .ruler')].map((one) => one.getBoundingClientRect().width)"
    subnormal, normal, _ = window.evaluate(script)
    assert normal / subnormal == pytest.approx(30 / 10, rel=0.01)
    # What is shaded in the histogram begins where float16's range ends, within a pixel.
    script = """[...document.querySelectorAll('#plot-exponents .zone, #plot-exponents .ruler.f16')].map((one) =>
        [one.getBoundingClientRect().left, one.getBoundingClientRect().right])"""
    (_, lost), weak, (overflow, _), *rulers = window.evaluate(script)
    assert [lost, *weak, overflow] == pytest.approx([rulers[0][0], *rulers[0], rulers[1][1]], abs=1)


def test_results_by_dtype_are_in_bytes_and_lead_to_the_ops(window: Page) -> None:
    written: Counter[str] = Counter()
    for record in RECORDS:
        written[record.gave[0]] += record.bytes_written
    for dtype, size in written.items():
        bars = numbers_in(window, f"#plot-written [data-name='{dtype}'] .fill", "value")
        assert bars == [(size,)]
    window.click("#plot-written [data-name=float32] button")
    assert window.inner_text("#shown") == "4 of 12 ops"


def test_casts_by_module_are_counted_and_the_longest_bar_moved_most(window: Page) -> None:
    casts: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for record in RECORDS:
        casts[record.path[0]] += len(record.casts)
        moved[record.path[0]] += sum(cast.bytes_read + cast.bytes_written for cast in record.casts)
    script = """[...document.querySelectorAll('#plot-casts .barrow')].map((row) =>
        [row.dataset.name, Number(row.querySelector('.fill').dataset.value),
         row.querySelector('.fill').getBoundingClientRect().width])"""
    drawn = window.evaluate(script)
    assert {name: value for name, value, _ in drawn} == {name: count for name, count in casts.items() if count}
    assert [name for name, _, _ in drawn] == sorted(
        (name for name in moved if casts[name]), key=lambda name: -moved[name]
    )
    widths = {name: width for name, _, width in drawn}
    assert max(widths, key=widths.__getitem__) == max(moved, key=moved.__getitem__) == "blocks.0.linear"
    # Bars have a least width, and pixels are whole: one percent.
    ratio = moved["blocks.1"] / moved["blocks.0.linear"]
    assert widths["blocks.1"] / widths["blocks.0.linear"] == pytest.approx(ratio, abs=0.01)


def test_errors_by_module_are_the_largest_of_each(window: Page) -> None:
    errors: dict[str, float] = {}
    for record in RECORDS:
        if record.numbers.error is not None:
            errors[record.path[0]] = max(errors.get(record.path[0], 0.0), record.numbers.error)
    script = """[...document.querySelectorAll('#plot-error .barrow')].map((row) =>
        [row.dataset.name, Number(row.querySelector('.fill').dataset.value)])"""
    drawn = dict(window.evaluate(script))
    assert drawn == errors
    assert max(drawn, key=drawn.__getitem__) == "blocks.1"


def test_a_dot_in_time_order_leads_to_its_op_and_the_largest_is_named(window: Page) -> None:
    dots = numbers_in(window, "#plot-max .dot", "value")
    assert sorted(value for (value,) in dots) == sorted(record.numbers.max_abs for record in RECORDS)
    assert window.text_content("#plot-max .top") == "1.31e5  linear, blocks.2.linear"
    window.locator("#plot-max .dot[data-value='131072']").click()
    assert window.inner_text("#details h3") == "5  aten::linear"


def test_the_plots_show_what_the_filters_leave(window: Page) -> None:
    window.select_option("#phase", "backward")
    assert window.locator("#plot-exponents .bin.forward").count() == 0
    assert window.locator("#plot-exponents .bin.backward").count() == 3
    assert window.locator("#plot-written .barrow").count() == 1
    assert "Nothing here." in window.inner_text("#plot-casts")


def test_by_op_counts_each_op_in_its_dtypes(window: Page) -> None:
    row = window.locator("#by-op tr[data-op='aten::linear']")
    assert row.locator("[data-column=ops]").inner_text() == "4"
    assert "bf16 \u2192 bf16 4" in row.locator(".dtypes").inner_text()
    row.locator(".name").click()
    assert window.inner_text("#shown") == "4 of 12 ops"


def test_without_numbers_there_are_no_plots_and_columns_of_numbers(opened: Opened) -> None:
    (region,) = REPORT.regions
    bare = replace(region, records=tuple(replace(record, numbers=None) for record in RECORDS))
    window = opened(replace(REPORT, regions=(bare,)))
    assert window.locator("figure").count() == 2
    assert window.locator("[data-column=max]").count() == 0
    assert window.locator("#fact-numbers").count() == 0
