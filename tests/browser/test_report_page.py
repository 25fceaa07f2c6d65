"""The page of a report in a real browser: it loads, alone, and its tree, filters and table do what they say."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from mezzo.report import OpRecord, Region, Report
from mezzo.report.numbers import Numbers

from .opened import Opened, rows_in, wait_for_text
from .sample import NASTY, many_ops, nasty, sample, with_initialisation

if TYPE_CHECKING:
    from playwright.sync_api import Page

REPORT = sample()
RECORDS = REPORT.records


def shown(window: Page) -> str:
    return window.inner_text("#shown")


def places(test: Callable[[OpRecord], object]) -> list[int]:
    return [place for place, record in enumerate(RECORDS) if test(record)]


# Loading


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_the_page_shows_something_in_either_scheme_and_fits_its_window(opened: Opened, scheme: str, width: int) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow reads the screenshot")
    window = opened(REPORT, width=width, color_scheme=scheme)
    picture = image.open(io.BytesIO(window.screenshot())).convert("L")
    lights = picture.histogram()
    background = sum(lights[:64] if scheme == "dark" else lights[192:]) / (picture.width * picture.height)
    # Text, lines and bars take a part of the page, and the background most of it.
    assert 0.6 < background < 0.99
    assert window.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_the_button_for_the_theme_overrules_the_system(opened: Opened) -> None:
    window = opened(REPORT, color_scheme="light")
    colour = "getComputedStyle(document.body).backgroundColor"
    seen = [window.evaluate(colour)]
    for _ in range(3):
        window.click("#theme")
        seen.append(window.evaluate(colour))
    assert seen[0] == seen[1] == seen[3] != seen[2]


def test_text_is_never_read_as_html(opened: Opened) -> None:
    window = opened(nasty())
    window.click(".sheet .row")
    assert window.evaluate("window.hit") is None
    assert window.evaluate("document.images.length") == 0
    plain = NASTY.replace("\u2028", " ")
    for selector in ("h1", ".setting b", ".kind", ".findings li", "#notes li", ".tree .name", "#details"):
        assert plain.split("<img")[0] in window.text_content(selector), selector
    assert window.title().startswith("</script>")


def test_nothing_from_outside_of_the_page_runs_or_loads(opened: Opened) -> None:
    window = opened(sample(1))
    assert window.evaluate("fetch('data:text/plain,1').then(() => 'loaded', () => 'refused')") == "refused"
    window.evaluate("""() => {
        const made = document.createElement("script");
        made.textContent = "window.hit = 1";
        document.body.append(made);
    }""")
    assert window.evaluate("window.hit") is None
    assert len(opened.complaints) >= 2
    assert all("Content Security Policy" in text for text in opened.complaints)
    opened.complaints.clear()


def test_without_javascript_the_findings_are_there(opened: Opened) -> None:
    window = opened(REPORT, java_script_enabled=False)
    assert "softmax gave 2.0 KiB in float32" in window.inner_text("noscript")
    assert "note: one note" in window.inner_text("noscript")


def test_a_report_without_ops_says_so(opened: Opened) -> None:
    window = opened(Report("nothing", "torch", (Region("nothing"),), ("autocast was off",)))
    assert "No ops were recorded." in window.inner_text("main")
    assert "autocast was off" in window.inner_text("#notes")


# The top


def test_the_top_adds_up_what_python_adds_up(window: Page) -> None:
    totals = REPORT.totals
    assert window.inner_text("#fact-ops .value") == str(totals.ops) == "12"
    assert window.inner_text("#fact-casts .value") == str(totals.casts) == "9"
    assert window.inner_text("#fact-dots .value") == "8"
    assert "8 bf16 \u00d7 bf16 \u2192 bf16" in window.inner_text("#fact-dots")
    # Four results of 8 x 64 in float32, eight in bfloat16.
    assert window.inner_text("#fact-written .value") == "16.0 KiB"
    # By elements: eight of twelve results, all of one shape.
    assert "67% of the float results in a low dtype" in window.inner_text("#fact-written")
    assert "5 NaN or Inf" in window.inner_text("#fact-numbers")


def test_findings_are_listed_with_advice_and_lead_to_their_ops(window: Page) -> None:
    items = window.locator(".findings li")
    assert items.count() == 9
    assert window.locator(".findings li:visible").count() == 6
    first = items.first.inner_text()
    assert "float32 memory" in first
    assert "nets/model.py:13 (forward)" in first
    assert "4 times" in first
    assert window.inner_text(".findings .advice code") == "policy.override({'softmax': 'lower_precision_fp'})"
    window.click("#all-findings")
    assert window.locator(".findings li:visible").count() == 9
    window.click(".findings li:first-child .place >> nth=0")
    assert rows_in(window) == places(lambda one: one.path[0].startswith("blocks.1"))
    window.click(".findings li:first-child .place >> nth=1")
    assert rows_in(window) == places(lambda one: one.source.line == 13)


# Modules


def test_the_tree_opens_closes_and_has_the_sums_of_what_is_inside(window: Page) -> None:
    window.click("text=close all")
    paths = "[...document.querySelectorAll('#modules tbody tr')].map((row) => row.dataset.path)"
    assert window.evaluate(paths) == ["blocks"]
    window.click("[aria-label='open blocks']")
    assert window.evaluate(paths) == ["blocks", *(f"blocks.{layer}" for layer in range(4))]
    window.click("[aria-label='open blocks.2']")
    assert "blocks.2.linear" in window.evaluate(paths)
    row = window.locator("tr[data-path='blocks.2']")
    inside = [one for one in RECORDS if one.path[0].startswith("blocks.2")]
    cells = {name: row.locator(f"[data-column={name}]").inner_text() for name in ("ops", "casts", "bad", "over", "max")}
    casts = sum(len(one.casts) for one in inside)
    # A hundred of the thousand numbers of one op of three are 2**17 and more, and 600 are 2**16 and more.
    assert cells == {"ops": "3", "casts": str(casts), "bad": "5", "over": "23%", "max": "1.31e5"}
    window.focus("[data-key='blocks']")
    window.keyboard.press("ArrowLeft")
    assert window.evaluate(paths) == ["blocks"]


def test_a_module_filters_the_ops_and_its_chip_takes_the_filter_off(window: Page) -> None:
    window.click("tr[data-path='blocks.3'] .name")
    assert rows_in(window) == places(lambda one: one.path[0].startswith("blocks.3"))
    assert shown(window) == "3 of 12 ops"
    # Other modules stay in sight, to choose from.
    assert window.locator("tr[data-path='blocks.0']").count() == 1
    window.click("#module")
    assert rows_in(window) == [*range(12)]


# Filters


@pytest.mark.parametrize(
    ("words", "test"),
    [
        ("softmax", lambda one: one.op == "aten::softmax"),
        ("LINEAR blocks.1", lambda one: one.path == ("blocks.1.linear",)),
        ("-softmax", lambda one: one.op != "aten::softmax"),
        ("model.py:13", lambda one: one.source.line == 13),
        ("op:aten::mm", lambda one: one.op == "aten::mm"),
        ("blocks.2.linear.weight", lambda one: "blocks.2.linear.weight" in one.operands),
        ("no such thing", lambda one: False),
    ],
)
def test_words_filter_the_ops(window: Page, words: str, test: Callable[[OpRecord], bool]) -> None:
    window.keyboard.press("/")
    window.keyboard.type(words)
    wanted = places(test)
    wait_for_text(window.locator("#shown"), f"{len(wanted)} of 12 ops")
    assert rows_in(window) == wanted
    assert window.locator("#ops >> text=No op fits the filters.").is_visible() == (not wanted)
    window.keyboard.press("Escape")
    assert shown(window) == "12 ops"


@pytest.mark.parametrize(
    ("name", "value", "test"),
    [
        ("phase", "backward", lambda one: one.phase == "backward"),
        ("dtype", "float32", lambda one: "float32" in one.used + one.gave),
        ("rule", "fp32", lambda one: one.rule == "fp32"),
        ("kind", "casts", lambda one: one.casts),
        ("kind", "dots", lambda one: one.dot),
        ("kind", "kept", lambda one: one.kept),
        ("kind", "bad", lambda one: one.numbers.inf),
        ("kind", "high", lambda one: one.op == "aten::softmax"),
    ],
)
def test_a_choice_filters_the_ops(window: Page, name: str, value: str, test: Callable[[OpRecord], object]) -> None:
    window.select_option(f"#{name}", value)
    wanted = places(test)
    assert 0 < len(wanted) < 12
    assert rows_in(window) == wanted
    window.click("#clear")
    assert shown(window) == "12 ops"
    assert window.input_value(f"#{name}") == ""


def test_initialisation_is_hidden_until_it_is_asked_for(opened: Opened) -> None:
    window = opened(with_initialisation())
    assert window.inner_text("#setup") == "3 initialisation ops: show"
    assert shown(window) == "14 of 17 ops"
    assert rows_in(window) == [*range(3, 17)]
    assert not window.is_visible("#clear")
    window.click("#setup")
    assert window.inner_text("#setup") == "3 initialisation ops: hide"
    assert rows_in(window) == [*range(17)]
    window.click("#setup")
    assert rows_in(window) == [*range(3, 17)]
    # A finding about them shows them.
    window.click(".findings .place")
    assert rows_in(window) == [0, 1]
    window.click("#clear")
    assert rows_in(window) == [*range(3, 17)]


def test_a_report_without_initialisation_has_no_button_for_it(window: Page) -> None:
    assert not window.is_visible("#setup")


@pytest.mark.parametrize("of_low", [1, 9])
def test_dtypes_stand_in_one_order_whatever_their_sizes(opened: Opened, of_low: int) -> None:
    sizes = {"int64": 2, "float16": of_low, "float32": 3, "bfloat16": 4}
    records = [OpRecord("exp", "x", gave=(dtype,), shapes_out=((size,),)) for dtype, size in sizes.items()]
    window = opened(Report("n", "torch", (Region("n", {}, tuple(records)),)))
    script = "[...document.querySelectorAll('#fact-written .part')].map((one) => one.title.split(':')[0])"
    assert window.evaluate(script) == ["float32", "bfloat16", "float16", "int64"]


def test_the_share_of_low_results_is_the_one_of_the_text(opened: Opened) -> None:
    # Of 8 floats 6 are low; by bytes it would be 12 of 20. Complex numbers and integers are neither.
    given = (("bfloat16", 6), ("float32", 2), ("complex64", 50), ("int64", 50))
    report = Report("n", "torch", (Region("n", {}, tuple(
        OpRecord("exp", "x", path=("m",), gave=(dtype,), shapes_out=((size,),)) for dtype, size in given)),))  # fmt: skip
    assert report.totals.low_share == 0.75
    window = opened(report)
    assert "75% of the float results in a low dtype" in window.inner_text("#fact-written")
    assert window.inner_text("tr[data-path='m'] [data-column='low']") == "75%"


def test_masks_are_named_and_are_no_alarm(opened: Opened) -> None:
    mask = OpRecord("aten::masked_fill", "x", path=("m",), gave=("float32",), shapes_out=((9,),),
                    numbers=Numbers(9, 3.0, 0.5, inf=4))  # fmt: skip
    window = opened(Report("n", "torch", (Region("n", {}, (mask,)),)))
    told = window.inner_text("#fact-numbers")
    assert "no NaN, no Inf" in told
    assert "4 Inf of masks" in told
    assert window.locator(".bad").count() == 0
    window.click(".sheet .row")
    assert "4 Inf of a mask, the others finite" in window.inner_text("#details")


def test_regions_are_told_apart(opened: Opened) -> None:
    two = Report("both", "jax", (Region("one", records=RECORDS[:5]), Region("other", records=RECORDS[5:])))
    window = opened(two)
    window.select_option("#region", "1")
    assert rows_in(window) == [*range(5, 12)]


# The table


@pytest.mark.parametrize(
    ("column", "key"),
    [
        ("op", lambda one: one.op),
        ("written", lambda one: -one.bytes_written),
        ("max", lambda one: -one.numbers.max_abs),
        ("error", lambda one: float("inf") if one.numbers.error is None else -one.numbers.error),
    ],
)
def test_a_click_on_a_heading_sorts(window: Page, column: str, key: Callable[[OpRecord], float]) -> None:
    """Numbers from the largest, text from A; what has none is last; what is alike stays in order."""
    window.click(f"[data-column={column}] button")
    assert rows_in(window) == sorted(range(12), key=lambda place: key(RECORDS[place]))
    heading = f".head [data-column={column}]"
    first = window.get_attribute(heading, "aria-sort")
    window.click(f"{heading} button")
    assert {first, window.get_attribute(heading, "aria-sort")} == {"ascending", "descending"}


def test_an_op_shows_all_that_is_known_of_it(window: Page) -> None:
    window.click(".sheet .row[data-index='2']")
    details = window.inner_text("#details")
    for text in ("3  aten::linear", "lower_precision_fp", "blocks.1.linear.weight", "8\u00d764", "by a cast kept from",
                 "/home/someone/nets/model.py:12 (forward)", "1\u2009000 numbers", "all finite"):  # fmt: skip
        assert text in details, text
    window.keyboard.press("Escape")
    window.focus(".optable")
    window.keyboard.press("ArrowDown")
    window.keyboard.press("ArrowDown")
    assert window.inner_text("#details h3") == "2  aten::softmax"


def test_of_many_ops_only_those_in_sight_are_in_the_page(opened: Opened) -> None:
    window = opened(many_ops(20_000))
    assert shown(window) == "20\u2009000 ops"
    assert len(rows_in(window)) < 100
    window.evaluate("document.querySelector('.optable').scrollTop = 1e9")
    window.wait_for_selector(".sheet .row[data-index='19999']")
    assert len(rows_in(window)) < 100
    # Of elements: the picture of the largest numbers has one dot for each of its columns and passes at most.
    assert window.evaluate("document.querySelectorAll('*').length") < 6000
    window.fill("#words", "softmax blocks.3")
    wait_for_text(window.locator("#shown"), "1\u2009667 of 20\u2009000 ops")
