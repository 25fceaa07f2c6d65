"""The HTML page of a report, without a browser: one file, nothing from outside, and all that the report says is in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from mezzo.report import OpRecord, Region, Report, SourceLine
from mezzo.report.html import page
from mezzo.report.nonfinite import NonFiniteReport
from mezzo.report.numbers import Loss, Numbers

from .reports import few, record, reports


def data_of(text: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    data: dict[str, Any] = json.loads(found)
    return data


@few
@given(report=reports())
def test_every_op_is_in_the_page_with_what_is_known_of_it(report: Report) -> None:
    data = data_of(page(report))
    columns = data["columns"]
    assert data["totals"] == json.loads(json.dumps(report.totals.as_dict()))
    assert {len(column) for column in columns.values()} == {len(report.records)}
    for at, one in enumerate(report.records):
        call = data["calls"][columns["call"][at]]
        row = {name: data["strings"][columns[name][at]] for name in ("op", "rule", "reason", "phase")}
        assert row == {"op": one.op, "rule": one.rule, "reason": one.reason, "phase": one.phase}
        assert (call["came"], call["used"], call["gave"]) == ([*one.came], [*one.used], [*one.gave])
        assert (call["in"], call["out"]) == (
            [[*shape] for shape in one.shapes_in],
            [[*shape] for shape in one.shapes_out],
        )
        assert call["casts"] == len(one.casts)
        assert sum(call["bytes"]) == one.bytes_written
        assert call["read"] + call["cast"] == one.as_dict()["cast_bytes"]
        assert data["places"][columns["place"][at]][0] == "/".join(one.path)
        assert (columns["source"][at] >= 0) == (one.source is not None)
        assert columns["times"][at] == (-1 if one.times is None else one.times)
    assert [len(region["findings"]) for region in data["regions"]] == [
        len(region.findings) for region in report.regions
    ]


@few
@given(report=reports())
def test_the_same_report_gives_the_same_page(report: Report) -> None:
    assert page(report) == page(replace(report))


def test_the_policy_of_the_page_lets_in_its_own_script_and_style_alone() -> None:
    text = page(Report("loss", "jax"))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    parts = dict(part.strip().split(" ", 1) for part in policy.replace("&#x27;", "'").split(";"))
    assert parts["default-src"] == "'none'"
    for kind, element in (("script-src", "script"), ("style-src", "style")):
        (inside,) = re.findall(f"<{element}>(.*?)</{element}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert parts[kind] == f"'sha256-{digest}'"
    assert set(parts) == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}
    assert parts["img-src"] == "data:"


def test_the_page_names_no_other_place_but_the_name_space_of_its_pictures() -> None:
    text = page(Report("loss", "jax"))
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}
    assert re.findall(r"\bsrc\s*=", text) == []
    assert re.findall(r'href="([^"]*)"', text) == ["data:,"]
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|eval\(|document\.write", text) == []


@pytest.mark.parametrize(
    "text", ["</script><b>", "<!--<script>", "{{data}} {{script}}", "a & b \u2028 \u00e9 \U0001f600", '"\\']
)
def test_any_text_comes_through_whole(text: str) -> None:
    one = record("exp", "float32", "bfloat16", "bfloat16", path=(text,), source=SourceLine(text, 1), reason=text)
    made = page(Report(text, "torch", (Region(text, {text: text}, (one,)),), (text,)))
    data = data_of(made)
    assert (data["title"], data["notes"], data["regions"][0]["settings"]) == (text, [text], {text: text})
    assert data["places"][0][0] == text
    assert data["sources"][0][0] == text
    assert made.count("<script") == made.count("</script>") == 2
    assert made.count("</html>") == 1


def test_a_file_name_that_is_no_text_does_not_keep_the_page_from_being_written() -> None:
    name = b"\xff.py".decode("utf-8", "surrogateescape")
    made = page(Report(name, "torch", (Region("r", records=(OpRecord("exp", "fp32", source=SourceLine(name, 1)),)),)))
    assert data_of(made.encode("utf-8").decode("utf-8"))["sources"][0][1] == 1


def test_numbers_are_in_the_page_and_those_that_json_lacks_as_text() -> None:
    numbers = Numbers(10, 3.0, 0.5, 1, 2, {"float16": Loss(0.25, 0.125, 0.5)}, {-1: 3, 1: 4}, float("inf"))
    made = page(Report("r", "torch", (Region("r", records=(OpRecord("exp", "fp32", numbers=numbers),)),)))
    # Elements, largest, smallest, NaN, Inf, error; shares in float16, in bfloat16; first exponent, counts from it on; Inf
    # of masks.
    assert data_of(made)["numbers"] == [
        [10, 3.0, 0.5, 1, 2, "Infinity", 0.25, 0.125, 0.5, 0.0, 0.0, 0.0, -1, [3, 0, 4], 0]
    ]


@pytest.mark.parametrize(
    ("framework", "path", "steps"),
    [
        ("torch", ("layers.0.mlp",), ["layers", "0", "mlp"]),
        ("torch", ("(Linear)",), ["(Linear)"]),
        ("torch", (), ["(outside of modules)"]),
        ("jax", ("jit f.g", "scan"), ["jit f.g", "scan"]),
    ],
)
def test_a_path_has_its_place_in_the_tree(framework: str, path: tuple[str, ...], steps: list[str]) -> None:
    made = page(Report("r", framework, (Region("r", records=(OpRecord("exp", "fp32", path=path),)),)))
    assert data_of(made)["places"][0][1] == steps


def test_what_repeats_is_written_once() -> None:
    """Of 20,000 like ops, 11 columns of small numbers are left: 50 bytes each, where the records have 700."""
    one = record("exp", "float32", "bfloat16", "bfloat16", path=("a.b",), source=SourceLine("net.py", 3))
    first = page(Report("r", "torch", (Region("r", records=(one,)),)))
    many = page(Report("r", "torch", (Region("r", records=(one,) * 20_000),)))
    assert len(many) - len(first) < 50 * 20_000


def test_findings_are_there_for_a_browser_without_javascript() -> None:
    report = NonFiniteReport(None, ("w: 1 NaN of 2",), 5)
    assert re.search(r"<noscript>.*5 ops, all finite.*w: 1 NaN of 2.*</noscript>", page(report), re.DOTALL)
    assert data_of(page(report)) == {
        "kind": "nonfinite",
        "first": None,
        "parameters": ["w: 1 NaN of 2"],
        "ops": 5,
        "notes": [],
    }


def test_what_only_holds_a_report_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes a Report or a NonFiniteReport, got Region; hand its \.report over"):
        page(Region("r"))  # type: ignore[arg-type]
