"""The page of a search for numbers that are not finite, in a real browser."""

from __future__ import annotations

import pytest

from mezzo.report import SourceLine
from mezzo.report.nonfinite import EarlierOp, NonFiniteOp, NonFiniteReport, OperandRange

from .opened import Opened, wait_for_text
from .sample import NASTY

LINE = SourceLine("/home/someone/nets/model.py", 44, "attention")
CODE = "q = q / math.sqrt(q.shape[-1])\nscores = q @ k.transpose(-2, -1)"


def found(text: str = "layers.3.attn") -> NonFiniteReport:
    first = NonFiniteOp(
        kind="Inf",
        op="aten::matmul",
        seen_as="aten::bmm",
        path=(text,),
        source=LINE,
        phase="forward",
        rule="lower_precision_fp",
        dtype="float16",
        shape=(8, 64, 64),
        nan=0,
        inf=12,
        operands=(
            OperandRange("float16", (8, 64, 32), -312.0, 298.0),
            OperandRange("float16", (8, 32, 64), -40960.0, 40960.0, name=f"{text}.weight"),
            OperandRange("float16", (2,), None, None, nan=1, inf=1),
        ),
        cause=f"the largest product is 4e8: {text}",
        advice=(
            f"scale first:\n    {CODE.replace(chr(10), chr(10) + '    ')}",
            "in float32: set_precision(model, 'fp32')",
        ),
        before=(EarlierOp("aten::mul", (text,), LINE, "forward", ("float16",), ("float16",)),),
        rank=3,
    )
    return NonFiniteReport(first, (f"{text}.weight: 64 NaN of 4096",), 1234, (f"a mask in {text}",))


def test_the_page_names_op_module_line_and_counts(opened: Opened) -> None:
    window = opened(found())
    assert window.inner_text("h1") == "Inf first appears in aten::matmul of layers.3.attn"
    told = "the first op whose result is not finite though all that went in is; 1\u2009234 ops watched"
    assert window.inner_text("header .settings") == told
    verdict = window.inner_text("#verdict")
    for text in (
        "aten::matmul (ran as aten::bmm)",
        "/home/someone/nets/model.py:44",
        "forward, rank 3",
        "lower_precision_fp",
        "12 Inf of 32\u2009768",
        "the largest product is 4e8",
    ):
        assert text in verdict, text
    assert window.locator("#parameters li").all_inner_texts() == ["layers.3.attn.weight: 64 NaN of 4096"]
    assert window.locator("#notes li").all_inner_texts() == ["a mask in layers.3.attn"]


def test_ranges_are_told_with_their_share_of_the_dtypes_range(opened: Opened) -> None:
    window = opened(found())
    rows = [row.split("\t") for row in window.locator("#operands tbody tr").all_inner_texts()]
    # 312 of 65504 and 40960 of 65504.
    assert rows == [
        ["", "f16", "8\u00d764\u00d732", "-312", "298", "0.48%", "", ""],
        ["layers.3.attn.weight", "f16", "8\u00d732\u00d764", "-40960", "40960", "63%", "", ""],
        ["", "f16", "2", "nothing finite", "", "", "1", "1"],
    ]


def test_what_ran_before_ends_with_the_op_itself(opened: Opened) -> None:
    window = opened(found())
    rows = [row.split("\t") for row in window.locator("#before tbody tr").all_inner_texts()]
    assert [row[0] for row in rows] == ["mul", "matmul"]
    assert rows[0][1:4] == ["layers.3.attn", "nets/model.py:44", "forward"]


def test_code_to_paste_is_copied_alone(opened: Opened) -> None:
    window = opened(found(), permissions=["clipboard-read", "clipboard-write"])
    copied = []
    for button in window.locator("#advice button.copy").all():
        button.click()
        wait_for_text(button, "copied")
        copied.append(window.evaluate("navigator.clipboard.readText()"))
    assert copied == [CODE, "set_precision(model, 'fp32')"]


def test_text_of_the_search_is_never_read_as_html(opened: Opened) -> None:
    window = opened(found(NASTY))
    assert window.evaluate("[window.hit, document.images.length]") == [None, 0]
    assert window.text_content("#cause") == f"the largest product is 4e8: {NASTY}"


@pytest.mark.parametrize(
    ("parameters", "title"),
    [((), "12 ops, all finite"), (("w: 1 NaN of 2",), "No op made it, and gradients are not finite")],
)
def test_a_search_that_found_no_op_says_so(opened: Opened, parameters: tuple[str, ...], title: str) -> None:
    window = opened(NonFiniteReport(None, parameters, 12))
    assert window.inner_text("h1") == title
    assert window.locator("#verdict").count() == 0
    assert window.locator("#parameters li").count() == len(parameters)
