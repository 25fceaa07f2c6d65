"""What ``mezzo run`` writes in the end: which files, for which rank; showing and saving do not hinder each other."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from mezzo.cli.lint_view import joined
from mezzo.cli.run_plan import RunPlan
from mezzo.cli.run_report import place_of, write_report
from mezzo.cli.run_rounds import Rounds
from mezzo.cli.run_watch import Watch
from mezzo.cli.script_runner import Target
from mezzo.report import Finding, OpRecord, Region, Report
from mezzo.report.nonfinite import NonFiniteReport


def seen(path: Path, *, report: bool = True, nonfinite: bool = False) -> tuple[RunPlan, Watch]:
    """Give a plan and what was seen, as after a script that did nothing of note."""
    plan = RunPlan(Target("train.py"), explain=report, find_nonfinite=nonfinite, lint=True, report=path)
    watch = Watch(plan)
    watch.started = True
    watch.report = Report("train.py", "torch") if report else None
    watch.nonfinite = NonFiniteReport(None, (), 7) if nonfinite else None
    return plan, watch


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", stream)
    return stream


@pytest.mark.parametrize("suffix", [".json", ".html", ".txt", ".JSON"])
@pytest.mark.parametrize(
    ("report", "nonfinite", "names"),
    [(True, False, ["out"]), (False, True, ["out"]), (True, True, ["out", "out.nonfinite"])],
)
def test_each_tool_has_a_file(
    report: bool, nonfinite: bool, names: list[str], suffix: str, tmp_path: Path, stderr: io.StringIO
) -> None:
    write_report(*seen(tmp_path / f"out{suffix}", report=report, nonfinite=nonfinite))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}{suffix}" for name in names)
    for name in names:
        assert f"mezzo: the report is in {tmp_path / name}{suffix}\n" in stderr.getvalue()
    text = (tmp_path / f"{names[-1]}{suffix}").read_text(encoding="utf-8")
    if suffix.lower() == ".json":
        assert ("first" in json.loads(text)) is nonfinite
    else:
        assert ("7 ops, all finite" in text) is nonfinite


@pytest.mark.parametrize("rank", [None, "0", "12"])
def test_a_rank_is_a_part_of_the_files_name(rank: str | None) -> None:
    assert place_of(Path("a/out.x.html"), rank) == Path("a/out.x.html" if rank is None else f"a/out.x.rank{rank}.html")


@pytest.mark.parametrize(
    ("environment", "name", "shown"),
    [
        ({}, "out.txt", True),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "out.txt", True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "out.rank0.txt", True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "out.rank1.txt", False),
    ],
)
def test_a_group_has_a_file_for_each_rank_and_shows_one_report(
    environment: dict[str, str],
    name: str,
    shown: bool,
    tmp_path: Path,
    stderr: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    write_report(*seen(tmp_path / "out.txt", nonfinite=True))
    assert (tmp_path / name).exists()
    assert ("nothing to report" in stderr.getvalue()) is shown
    assert ("7 ops, all finite" in stderr.getvalue()) is shown


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("150", 150), (None, 120), ("", 120)])
def test_boxes_are_as_wide_as_columns_says(
    columns: str | None, width: int, tmp_path: Path, stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    write_report(*seen(tmp_path / "out.txt"))
    assert len(stderr.getvalue().splitlines()[0]) == width


FINDING = Finding("eps lost", "eps=1e-08 is 0 in float16", "take 1e-4", path=("norm",))


def test_findings_of_the_lint_alone_have_no_box_with_nothing_in_it(tmp_path: Path, stderr: io.StringIO) -> None:
    plan, watch = seen(tmp_path / "out.txt", report=False)
    watch.report = Report("train.py", "torch", (Region("lint", findings=(FINDING,)),), ("a note",))
    write_report(plan, watch)
    assert stderr.getvalue().splitlines()[:5] == [
        "train.py: the lint has found 1 thing",
        "eps lost: norm",
        "  eps=1e-08 is 0 in float16",
        "  take 1e-4",
        "note: a note",
    ]


def test_findings_of_the_lint_join_the_region_that_was_recorded() -> None:
    full = Region("train.py", records=(OpRecord("aten::mul", "not listed"),))
    report = Report("train.py", "torch", (full, Region("lint", findings=(FINDING,))))
    (region,) = joined(report).regions
    assert (region.name, region.findings, region.records) == ("train.py", (FINDING,), full.records)


def test_a_file_that_cannot_be_written_is_told_and_the_rest_is_shown(tmp_path: Path, stderr: io.StringIO) -> None:
    (tmp_path / "out.txt").mkdir()
    write_report(*seen(tmp_path / "out.txt"))
    assert "nothing to report" in stderr.getvalue()
    assert "mezzo: the report could not be saved: " in stderr.getvalue()
    assert "out.txt" in stderr.getvalue()


def test_a_name_that_is_no_text_is_written_as_an_escape(tmp_path: Path, stderr: io.StringIO) -> None:
    plan, watch = seen(tmp_path / "out.txt", nonfinite=True)
    watch.report = Report("tr\udcffin.py", "torch")
    watch.nonfinite = NonFiniteReport(None, (), 7, ("at tr\udcffin.py:1",))
    write_report(plan, watch)
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == "tr\\udcffin.py: nothing to report\n"
    assert (tmp_path / "out.nonfinite.txt").read_text(encoding="utf-8").endswith("note: at tr\\udcffin.py:1\n")


def test_a_name_that_no_file_can_have_is_told(tmp_path: Path, stderr: io.StringIO) -> None:
    write_report(*seen(tmp_path / "a\0b.txt"))
    assert "mezzo: the report could not be saved: embedded null byte\n" in stderr.getvalue()


@pytest.mark.parametrize("suffix", [".json", ".txt"])
def test_the_file_of_a_search_says_that_the_script_broke_off(suffix: str, tmp_path: Path, stderr: io.StringIO) -> None:
    plan, watch = seen(tmp_path / f"out{suffix}", report=False)
    watch.nonfinite = Rounds().verdict(NonFiniteReport(None, (), 7), lasts=False, ended="KeyError")
    write_report(plan, watch)
    text = (tmp_path / f"out{suffix}").read_text(encoding="utf-8")
    assert "7 ops ran before the script broke off; their results were finite" in text
    assert "all finite" not in text


def test_it_is_saved_though_nobody_reads_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(text)

    monkeypatch.setattr(sys, "__stderr__", Gone())
    write_report(*seen(tmp_path / "out.txt"))
    monkeypatch.setattr(sys, "__stderr__", None)
    write_report(*seen(tmp_path / "again.txt"))
    assert {path.name for path in tmp_path.iterdir()} == {"out.txt", "again.txt"}


def test_a_lint_that_finds_nothing_says_so(tmp_path: Path, stderr: io.StringIO) -> None:
    write_report(*seen(tmp_path / "out.txt", report=False))
    assert stderr.getvalue() == "mezzo: the lint has found nothing\n"
    assert not [*tmp_path.iterdir()]
