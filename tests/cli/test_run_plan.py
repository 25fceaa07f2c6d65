"""The options of ``mezzo run``: what follows from them, and that a wrong one is told before the script starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mezzo.cli.app import app
from mezzo.cli.run_plan import RunPlan, RunScript
from mezzo.cli.script_runner import Target


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


def plan(*arguments: str) -> RunPlan:
    """Give what a command line asks for."""
    with pytest.raises(RunScript) as chosen:
        CliRunner().invoke(app, ["run", *arguments])
    return chosen.value.plan


def complaint(*arguments: str) -> str:
    """Give the one line that a wrong call is answered with."""
    result = CliRunner().invoke(app, ["run", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    return line


def asked(one: RunPlan) -> set[str]:
    return {field.name for field in dataclasses.fields(one) if getattr(one, field.name) is True}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], {"explain"}),
        (["--explain"], {"explain"}),
        (["--numerics"], {"explain", "numerics"}),
        (["--shadow"], {"explain", "numerics", "shadow"}),
        (["--shadow", "--find-nonfinite"], {"explain", "numerics", "shadow", "find_nonfinite"}),
        (["--steps", "5"], {"explain"}),
        (["--report", "out.json"], {"explain"}),
        (["--find-nonfinite"], {"find_nonfinite"}),
        (["--find-nonfinite", "--report", "out.json"], {"find_nonfinite"}),
        (["--find-nonfinite", "--explain"], {"find_nonfinite", "explain"}),
        (["--lint"], {"lint"}),
        (["--lint", "--numerics"], {"lint", "explain", "numerics"}),
        (["--policy", "fp32"], set()),
        (["--policy", "fp32", "--report", "out.json"], {"explain"}),
        (["--policy", "fp32", "--lint"], {"lint"}),
    ],
    ids=lambda given: " ".join(sorted(given) if isinstance(given, set) else given),
)
def test_what_is_watched_follows_from_the_options(options: list[str], names: set[str], script: str) -> None:
    one = plan(*options, script)
    assert asked(one) == names
    assert one.watches is bool(names)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ([], 3),
        (["--steps", "1"], 1),
        (["--steps", "all"], None),
        (["--steps", "007"], 7),
        (["--steps", "9" * 5000], None),
    ],
    ids=lambda one: str(one)[:20],
)
def test_the_number_of_steps(options: list[str], steps: int | None, script: str) -> None:
    assert plan(*options, script).steps == steps


def test_options_after_the_script_are_the_scripts(script: str) -> None:
    one = plan("--lint", script, "--explain", "--steps", "x", "-m", "--", "--help")
    assert one.target == Target(script, ("--explain", "--steps", "x", "-m", "--", "--help"))
    assert asked(one) == {"lint"}


def test_a_module_is_not_looked_for_as_a_file() -> None:
    assert plan("--explain", "-m", "pkg.train", "-m").target == Target("pkg.train", ("-m",), module=True)


def test_paths_are_those_of_the_folder_it_was_started_in(script: str, tmp_path: Path) -> None:
    Path("mine.toml").write_text('name = "mine"\nbase = "fp32"\n')
    one = plan("--policy", "mine.toml", "--report", "out.html", script)
    assert one.report == tmp_path / "out.html"
    assert one.policy is not None
    assert one.policy.name == "mine"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["nowhere.py"],
            "mezzo: There is no script 'nowhere.py'; give the path of a script, or -m and the name of a module.",
        ),
        (
            ["--steps", "0", "train.py"],
            "mezzo: --steps is '0'; give a number from 1, or 'all' to record to the end of the",
        ),
        (["--steps", "-2", "train.py"], "mezzo: --steps is '-2'; give a number from 1"),
        (["--steps", "some", "train.py"], "mezzo: --steps is 'some'; give a number from 1"),
        (
            ["--report", "out.pdf", "train.py"],
            "mezzo: --report is 'out.pdf'; a report is written as .html, .json, .txt, by",
        ),
        (
            ["--report", "out", "train.py"],
            "mezzo: --report is 'out'; a report is written as .html, .json, .txt, by the end",
        ),
        (["--report", "no/out.html", "train.py"], "mezzo: --report is 'no/out.html', and there is no folder '"),
        (
            ["--policy", "fp23", "train.py"],
            "mezzo: 'fp23' is no built-in policy; allowed are default, torch, unified, fp32,",
        ),
        (["--policy", "none.toml", "train.py"], "mezzo: [Errno 2] No such file or directory: 'none.toml'"),
        (
            ["--policy", "jax.toml", "train.py"],
            "mezzo: policy 'mine' is for 'jax', and this is the adapter for 'torch'.",
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else " ".join(one),
)
def test_a_wrong_call_is_told_what_is_allowed(arguments: list[str], text: str, script: str) -> None:
    Path("jax.toml").write_text('name = "mine"\nframework = "jax"\n')
    assert complaint(*arguments).startswith(text)


def test_without_a_script_it_says_how_to_call_it() -> None:
    result = CliRunner().invoke(app, ["run", "--explain"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "SCRIPT" in result.stderr


def test_the_help_names_every_option() -> None:
    result = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, ["run", "--help"])
    assert result.exit_code == 0
    names = ("explain", "numerics", "shadow", "find-nonfinite", "lint", "policy", "report", "steps")
    for option in (*(f"--{name}" for name in names), "-m"):
        assert option in result.stdout
