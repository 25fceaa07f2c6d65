"""The documents are true: their code runs and prints what they say, their commands work, their links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.programs import COMPILER, run_python

from .docstrings import WITH_DOCTESTS, assert_examples_are_true
from .documents import (
    DOCUMENTS,
    ROOT,
    anchors,
    blocks,
    commands,
    links,
    promised_output,
    python_program,
    write_files,
)
from .public_names import IMPORT_TENSORPLAY

EXECUTED = [document for document in DOCUMENTS if any(block.language == "python" for block in blocks(document))]

# TensorPlay must not meet PyTorch, which the others find imported.
OWN_PROCESS = re.compile(rf"{COMPILER.pattern}|tensorplay")


def by_name(path: Path) -> str:
    return path.name


def run(arguments: list[str], folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run Python with warnings as errors, wide enough for every table; what the text shows says in which process."""
    return run_python(arguments, folder, own=OWN_PROCESS.search(text) is not None, COLUMNS="200")


def missing(promised: list[str], printed: list[str]) -> str | None:
    """Give the first promised line that is not printed after those before it; None if all are.

    What follows a colon and a space may be an explanation.
    """
    rest = iter(printed)
    return next(
        (line for line in promised if not any(f"{line}: ".startswith(f"{found}: ") for found in rest if found)), None
    )


@pytest.mark.parametrize("document", EXECUTED, ids=by_name)
def test_the_python_blocks_of_a_document_run_and_print_what_they_say(document: Path, tmp_path: Path) -> None:
    write_files(document, tmp_path)
    program = python_program(document)
    if "tensorplay" in program and not find_spec("tensorplay"):
        pytest.skip("the document shows TensorPlay, which is not installed")
    # Under the document's name, so that a traceback's line numbers are the document's.
    copy = tmp_path / document.name
    copy.write_text(program, encoding="utf-8")
    done = run([str(copy)], tmp_path, program)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    printed = [line.strip() for line in done.stdout.splitlines()]
    assert missing(promised_output(program), printed) is None, done.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_the_commands_of_a_document_work_and_print_what_it_shows(document: Path, tmp_path: Path) -> None:
    write_files(document, tmp_path)
    for command, shown in commands(document):
        words = shlex.split(command)
        if words[:3] == ["python", "-m", "mezzo"]:
            words = words[2:]
        if words[0] != "mezzo" or words[1:2] == ["demo"]:  # the demo has tests of its own, and takes its time
            continue
        done = run(["-m", *words], tmp_path, "tensorplay" if "tensorplay" in words else "")
        assert done.returncode == 0, f"{command}: {done.stderr}"
        printed = [line.strip() for line in done.stdout.splitlines()]
        assert missing(shown, printed) is None, f"{command}:\n{done.stdout}"


def test_the_guide_shows_code_and_commands() -> None:
    """So that the tests above have something to run, and reading the blocks does not fail in silence."""
    guide = ROOT / "docs" / "amp.md"
    assert len([block for block in blocks(guide) if block.language == "python"]) >= 8
    assert len(promised_output(python_program(guide))) >= 12
    assert len(commands(guide)) >= 3


def test_a_line_that_is_not_printed_or_comes_too_early_is_missed() -> None:
    assert missing(["a", "b"], ["a", "x", "b"]) is None
    assert missing(["a", "b"], ["b", "a"]) == "b"
    assert missing(["c"], ["a"]) == "c"
    assert missing(["torch.float32: as on CUDA"], ["torch.float32"]) is None
    assert missing(["torch.float32: as on CUDA"], ["torch.float", "", "torch.float32: no"]) is not None


def test_the_op_reference_is_what_the_tables_give() -> None:
    from mezzo.cli.reference import reference

    written = (ROOT / "docs" / "op-reference.md").read_text(encoding="utf-8")
    assert written == reference(), "run `make docs`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_relative_links_lead_to_files_and_headings(document: Path) -> None:
    for link in links(document):
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{document.name}: {link}"
        assert target.is_relative_to(ROOT), f"{document.name}: {link} leads out of the repository"
        assert not anchor or anchor in anchors(target), f"{document.name}: {link}"


# Those that need TensorPlay run in a process of their own: tests/tensorplay/packaging.
@pytest.mark.parametrize("name", [name for name in WITH_DOCTESTS if name not in IMPORT_TENSORPLAY])
def test_the_examples_in_docstrings_are_true(name: str) -> None:
    if name.startswith("mezzo.apex"):
        # amp has one state for the process: each example starts and leaves it behind.
        from tests.apex.conftest import end_amp

        end_amp()
        assert_examples_are_true(name, ellipsis=True)
        end_amp()
    else:
        assert_examples_are_true(name)


def test_every_module_of_the_core_and_of_the_adapter_with_public_functions_has_an_example() -> None:
    named = set(WITH_DOCTESTS)
    assert {
        "mezzo",
        "mezzo.policy",
        "mezzo.builtin",
        "mezzo.tables",
        "mezzo.decision",
    } <= named
    assert {
        "mezzo.torch",
        "mezzo.torch.autocast",
        "mezzo.torch.functions",
        "mezzo.torch.observe",
    } <= named
    assert "mezzo.torch.policies" in named
    assert {
        "mezzo.jax",
        "mezzo.jax.autocast",
        "mezzo.jax.explain",
        "mezzo.jax.functions",
        "mezzo.jax.master_weights",
        "mezzo.jax.ops",
        "mezzo.jax.optax_wrappers",
        "mezzo.jax.scaler",
        "mezzo.jax.scopes",
        "mezzo.jax.stepping",
        "mezzo.report",
    } <= named
