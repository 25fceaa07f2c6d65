"""A report as a file: JSON that any reader takes, a page, text; whole or not at all."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from mezzo.report import Report
from mezzo.report.numbers import Loss, Numbers
from mezzo.report.saving import json_text

from .module_reports import large, module_report

DOCUMENT = Path(__file__).parents[2] / "docs" / "report.md"


def read_strictly(path: Path) -> Any:
    """Read JSON as readers do that do not know Python's Infinity and NaN."""

    def refuse(constant: str) -> None:
        msg = f"{constant} is no JSON"
        raise ValueError(msg)

    return json.loads(path.read_text(encoding="ascii"), parse_constant=refuse)


def test_json_holds_the_data_of_the_report(tmp_path: Path) -> None:
    report = module_report(2, large())
    written = report.save(tmp_path / "net.json")
    assert written == tmp_path / "net.json"
    data = read_strictly(written)
    assert data == report.as_dict()
    assert data["format"] == 1
    assert data["modules"]["modules"][0]["modules"][1]["name"] == "layers.1"
    assert data["by_op"][0]["op"] == "aten::layer_norm"
    assert {one["dtype"] for one in data["by_dtype"]} == {"bfloat16", "float32"}
    assert [path.name for path in tmp_path.iterdir()] == ["net.json"]


def test_numbers_that_json_does_not_have_are_strings_that_can_be_read_back(tmp_path: Path) -> None:
    odd = Numbers(3, math.inf, 0.5, losses={"float16": Loss(overflow=math.nan)}, error=-math.inf)
    data = read_strictly(module_report(1, odd).save(tmp_path / "odd.json"))
    numbers = data["regions"][0]["ops"][0]["numbers"]
    assert (numbers["max_abs"], numbers["error"]) == ("Infinity", "-Infinity")
    assert float(numbers["max_abs"]) == math.inf
    assert math.isnan(float(numbers["losses"]["float16"]["overflow"]))
    assert numbers["min_abs"] == 0.5


def test_text_holds_the_whole_table(tmp_path: Path) -> None:
    report = module_report(40)
    text = report.save(str(tmp_path / "net.txt")).read_text(encoding="utf-8")
    assert text.endswith("note: a [note]\n")
    assert "layers.39.attn.qkv" in text
    assert "more ops" not in text
    assert "more ops" in str(report)


@pytest.mark.parametrize("suffix", ["txt", "json", "html"])
def test_a_name_that_is_no_text_hinders_no_format(suffix: str, tmp_path: Path) -> None:
    text = Report("n\udcfft", "torch").save(tmp_path / f"net.{suffix}").read_text(encoding="utf-8")
    assert {"txt": "n\\udcfft: nothing to report\n", "json": '"n\\udcfft"', "html": "<title>n?t"}[suffix] in text


@pytest.mark.parametrize("name", ["net.html", "NET.HTML"])
def test_a_page_is_html_whatever_the_case_of_its_name(tmp_path: Path, name: str) -> None:
    text = module_report(1).save(tmp_path / name).read_text(encoding="utf-8")
    assert text.lower().startswith("<!doctype html>")
    assert "float32 memory" in text


@pytest.mark.parametrize("name", ["net", "net.csv", "net.json.gz", ".json"])
def test_a_name_that_says_no_format_is_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    wanted = f"A report is saved as .json, .html, .txt, by how the file's name ends; got {str(tmp_path / name)!r}."
    with pytest.raises(ValueError, match=re.escape(wanted)):
        Report("Net", "torch").save(tmp_path / name)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_not_there_is_said_and_an_older_file_is_replaced(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        Report("Net", "torch").save(tmp_path / "missing" / "net.txt")
    path = tmp_path / "net.txt"
    path.write_text("older and longer than the new one is")
    assert Report("Net", "torch").save(path).read_text() == "Net: nothing to report\n"


def test_a_failure_leaves_the_older_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text("older")
    (tmp_path / "net.html").mkdir()
    with pytest.raises(OSError, match=r"net\.html"):
        module_report(1).save(tmp_path / "net.html")
    with pytest.raises(TypeError, match="not JSON serializable"):
        Report("Net", "torch", notes=(object(),)).save(path)  # type: ignore[arg-type]
    assert path.read_text() == "older"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["net.html", "net.json"]


def test_json_is_plain_for_plain_data() -> None:
    assert json_text({"a": [1, 2.5, None, True, "ü"]}) == '{"a": [1, 2.5, null, true, "\\u00fc"]}'


# The document


def keys_documented(heading: str) -> set[str]:
    """Read the names in the first column of the table under a heading."""
    section = DOCUMENT.read_text(encoding="utf-8").split(f"### {heading}\n", maxsplit=1)[1].split("\n#", maxsplit=1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_each_key_of_the_data_is_in_the_document_and_no_other() -> None:
    data = module_report(1, large()).as_dict()
    region = data["regions"][0]
    found = {
        "The report": data,
        "Totals": data["totals"],
        "A matrix product": data["totals"]["dots"][0],
        "A region": region,
        "A finding": region["warnings"][0],
        "An op": region["ops"][0],
        "Numbers": region["ops"][0]["numbers"],
        "A loss": region["ops"][0]["numbers"]["losses"]["float16"],
        "A module": data["modules"],
        "Calls of an op": data["by_op"][0],
        "Ops of a dtype": data["by_dtype"][0],
    }
    assert {heading: keys_documented(heading) for heading in found} == {
        heading: {*one} for heading, one in found.items()
    }
