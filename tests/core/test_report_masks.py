"""Inf that the program filled in is a mask and no fault; any other Inf, and NaN always, is one."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from mezzo.report import OpRecord, Region, Report
from mezzo.report.masks import with_masks_marked
from mezzo.report.numbers import Numbers
from mezzo.report.worst import worst


def op(name: str, inf: int = 0, *, elements: int = 16, largest: float = 3.0, nan: int = 0, **more: Any) -> OpRecord:
    numbers = Numbers(elements, largest, 0.5, nan=nan, inf=inf)
    values = {"came": ("float16",), "used": ("float16",), "gave": ("float16",)} | more
    return OpRecord(
        f"aten::{name}",
        "not listed",
        shapes_in=((elements,),) * len(values["came"]),
        shapes_out=((elements,),),
        numbers=numbers,
        **values,
    )


def masked(*records: OpRecord) -> list[int]:
    return [record.numbers.masked for record in with_masks_marked(records) if record.numbers is not None]


@pytest.mark.parametrize("name", ["masked_fill", "masked_fill_", "where", "full", "triu", "index_put_"])
def test_what_an_op_fills_in_is_a_mask(name: str) -> None:
    assert masked(op(name, 6)) == [6]


@pytest.mark.parametrize("name", ["linear", "matmul", "exp", "mul", "pow", "log", "div"])
def test_what_an_op_computes_is_no_mask(name: str) -> None:
    assert masked(op(name, 6)) == [0]


def test_a_mask_that_is_made_added_scaled_and_copied_stays_one() -> None:
    made = [op("full", 16), op("triu", 6), op("_to_copy", 6), op("add", 96, elements=256), op("div", 96, elements=256)]
    assert masked(*made) == [16, 6, 6, 96, 96]


def test_a_mask_from_before_is_known_by_its_sum_unless_a_sum_could_overflow() -> None:
    assert masked(op("add", 6)) == [6]
    # 40000 + 40000 is more than float16 has, and less than nothing to bfloat16.
    assert masked(op("linear", largest=40000.0), op("add", 6)) == [0, 0]
    assert masked(op("linear", largest=40000.0), op("add", 6, gave=("bfloat16",))) == [0, 6]


def test_a_cast_to_a_smaller_dtype_may_have_made_the_inf_itself() -> None:
    assert masked(op("_to_copy", 6, came=("float32",), used=("float32",))) == [0]
    assert masked(op("add", 6, came=("float32",))) == [0]
    assert masked(op("masked_fill", 6, gave=("float32",)), op("_to_copy", 6, came=("float32",))) == [6, 6]


def test_nan_is_a_fault_wherever_it_is() -> None:
    assert masked(op("masked_fill", 6, nan=1)) == [0]
    assert masked(op("full", nan=16)) == [0]


def test_after_a_fault_only_the_shares_of_earlier_masks_are_masks() -> None:
    assert masked(op("masked_fill", 6), op("linear", 1), op("masked_fill", 7), op("masked_fill", 6)) == [6, 0, 0, 6]


def test_an_overflow_of_the_backward_pass_is_no_mask_and_spoils_none() -> None:
    assert masked(op("where", 6, phase="backward"), op("masked_fill", 6)) == [0, 6]


def test_masks_are_no_headline_and_the_fault_behind_them_is() -> None:
    records = (op("masked_fill", 6), op("add", 6), op("exp", 2))
    found = worst(Region("net", records=records).records)
    assert {what: (how, record.op) for what, (how, record) in found.items()} == {
        "not finite": ("first, 2 Inf", "aten::exp")
    }
    assert worst(Region("net", records=records[:2]).records) == {}


def test_the_text_names_masks_and_shows_the_largest_number_of_their_module() -> None:
    text = str(Report("net", "torch", (Region("net", records=(op("masked_fill", 6, path=("attn",)),)),)))
    assert "forward    abs 0.5 .. 3, 6 Inf of masks" in text
    assert "not finite" not in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("  attn")]
    assert row[-1] == "3"


def test_a_part_of_a_report_and_a_copy_keep_what_was_found_of_the_whole() -> None:
    report = Report("net", "torch", (Region("net", records=(op("linear", largest=4e4), op("add", 6), op("full", 6))),))
    before = [record.numbers.masked for record in report.records if record.numbers]
    assert before == [0, 0, 0]
    for part in (report.where(op="aten::full"), report.where(op="aten::add")):
        assert [record.numbers.masked for record in part.records if record.numbers] == [0]
    assert pickle.loads(pickle.dumps(report)) == report


def test_masks_add_up_and_are_in_the_data() -> None:
    both = Numbers.merge([Numbers(4, 1.0, 1.0, inf=2, masked=2), Numbers(4, 1.0, 1.0, inf=3)])
    assert (both.inf, both.masked, both.bad_inf, both.as_dict()["masked"]) == (5, 2, 3, 2)
    assert Numbers(4, 1.0, 1.0, inf=2, masked=2) != Numbers(4, 1.0, 1.0, inf=2)
