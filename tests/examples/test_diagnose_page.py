"""The commands of `docs/diagnose.md` find in each story what the page shows, in the scripts as they are."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.documents import ROOT, blocks

PAGE = ROOT / "docs" / "diagnose.md"
STORIES = ROOT / "examples" / "diagnose"

_PLACE = re.compile(r"[\w/]+\.py:\d+")
_NUMBER = re.compile(r"(?<![\w.\"])-?\d[\d.,]*(e[-+]?\d+)?")


def shown(document: Path) -> dict[str, list[str]]:
    """Give a document's commands that run a story, each with the lines that it shows of the output."""
    found: dict[str, list[str]] = {}
    for block in blocks(document):
        if block.language == "console" and STORIES.name in block.text:
            command, *lines = block.text.splitlines()
            found[command.removeprefix("$ ")] = [line for line in lines if line.strip() and line.strip() != "..."]
    return found


def masked(line: str) -> str:
    """Put 0 for numbers, which differ in their last digits between machines; a place in a file stays."""
    places = _PLACE.findall(line)
    text = " ".join(_NUMBER.sub("0", _PLACE.sub("@", line)).split())
    return " ".join([text, *places])


COMMANDS = shown(PAGE)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: Path(shlex.split(command)[-1]).stem)
def test_a_command_finds_what_the_page_shows(command: str) -> None:
    words = shlex.split(command)
    assert words[0] == "mezzo"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    printed = map(masked, done.stdout.splitlines())
    for line in COMMANDS[command]:
        assert masked(line) in printed, f"not shown, or before the line above it: {line}\n{done.stdout}"


def test_the_page_tells_each_story_and_names_op_module_and_line() -> None:
    scripts = {shlex.split(command)[-1] for command in COMMANDS}
    assert scripts == {str(path.relative_to(ROOT)) for path in STORIES.glob("*.py")}
    for command, lines in COMMANDS.items():
        assert _PLACE.search("\n".join(lines)), f"{command}: no line of the script is shown"


def test_the_readme_shows_lines_of_the_page() -> None:
    ((command, lines),) = shown(ROOT / "README.md").items()
    rest = iter(COMMANDS[command])
    assert all(line in rest for line in lines)


def test_masked_lines_differ_in_anything_but_numbers() -> None:
    assert masked("  float16 (50, 8) from -1.5 to 2e+05") == masked("float16 (50, 8) from -1.4 to 1e+05")
    assert masked("line     a/b.py:34 (f)") != masked("line     a/b.py:35 (f)")
    assert masked("in float16") != masked("in float32")
