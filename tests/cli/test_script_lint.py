"""The lint of a script: models are found by the optimizers that step them, or among what is alive."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from mezzo.cli.script_lint import ScriptLint, models_of, outermost_models
from mezzo.torch.linting.lint import lint_script


@pytest.fixture(autouse=True)
def _nothing_of_other_tests() -> None:
    """Models and scalers are found among what is alive, and those of other tests may wait in cycles."""
    gc.collect()
    gc.freeze()  # what other tests have left alive is looked for with gc.get_objects(), which does not give what is frozen


def kinds(lint: ScriptLint) -> set[str]:
    return {finding.kind for finding in lint.findings} - {"slow dtype"}


def test_the_models_of_an_optimizer_are_the_outermost_that_have_its_parameters() -> None:
    inner, other = nn.Linear(2, 2), nn.Linear(2, 2)
    outer = nn.Sequential(nn.Sequential(inner, nn.ReLU()))
    assert models_of(torch.optim.SGD(inner.parameters(), lr=0.1)) == [outer]
    both = models_of(torch.optim.SGD([*inner.parameters(), *other.parameters()], lr=0.1))
    assert {id(model) for model in both} == {id(outer), id(other)}


def test_modules_without_parameters_are_no_models() -> None:
    bare = nn.ReLU()
    assert not any(model is bare for model in outermost_models())


def test_looking_for_models_asks_no_object_for_its_class() -> None:
    class Lazy:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            msg = "woken"
            raise RuntimeError(msg)

    lazy = [Lazy()]
    outermost_models()
    assert len(lazy) == 1


def test_an_eps_that_the_parameters_dtype_loses_is_found() -> None:
    net = nn.Linear(2, 2).half()
    lint = ScriptLint()
    lint.look_at(torch.optim.Adam(net.parameters()))
    assert "eps lost" in kinds(lint)


def test_parameters_in_float32_keep_the_eps() -> None:
    net = nn.Linear(2, 2)
    lint = ScriptLint()
    lint.look_at(torch.optim.Adam(net.parameters()))
    assert kinds(lint) == set()


@pytest.mark.parametrize(("scaled", "found"), [(True, True), (False, False)])
def test_with_a_scaler_at_work_the_dtype_is_float16(scaled: bool, found: bool) -> None:
    # bfloat16, which autocast takes on the CPU, holds this number.
    net = nn.Linear(2, 2)
    net.register_buffer("mask", torch.full((2,), -1e9))
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    lint = ScriptLint()
    lint.look_at(torch.optim.SGD(net.parameters(), lr=0.1))
    assert ("mask overflow" in kinds(lint)) is found
    assert scaler.is_enabled() is scaled


def test_a_script_without_an_optimizer_is_looked_at_in_the_end(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "import torch\n\ndef masked(scores, mask):\n    with torch.autocast('cpu', dtype=torch.float16):\n"
        "        return scores.masked_fill(mask, -1e9)\n"
    )
    lint = ScriptLint()
    net = nn.Linear(2, 2).half()
    lint.finish(str(file))
    assert [(finding.kind, finding.source.line) for finding in lint.findings if finding.source] == [
        ("mask overflow", 5)
    ]
    assert net.weight.dtype is torch.float16


@pytest.mark.parametrize("file", [None, "no/such.py"])
def test_a_script_that_is_in_no_file_is_no_error(file: str | None) -> None:
    lint = ScriptLint()
    lint.look_at(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    lint.finish(file)
    assert kinds(lint) == set()


def test_nothing_of_the_script_is_kept_alive() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    lint = ScriptLint()
    lint.look_at(optimizer)
    gone = [weakref.ref(net), weakref.ref(optimizer)]
    del net, optimizer
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_the_same_twice_is_told_once() -> None:
    net = nn.Linear(2, 2).half()
    lint = ScriptLint()
    optimizer = torch.optim.Adam(net.parameters())
    lint.look_at(optimizer)
    before = lint.findings
    lint.look_at(optimizer)
    assert lint.findings == before


SCRIPT = """
import torch
from torch import nn

def normalise(a):
    return (a - a.mean(0)) / (a.std(0) + 1e-8)

def accuracy(right, seen):
    return right / (seen + 1e-9)

def unit(x):
    return x / ({unit})

class Net(nn.Module):
    def forward(self, x):
        return {forward}

def main(net, x):
    with torch.autocast("cpu", dtype=torch.float16):
        y = {region}
    return accuracy(y.sum().item(), len(x)), normalise(x)
"""


def test_numbers_of_a_script_that_are_for_no_model_are_not_found(tmp_path: Path) -> None:
    fine = {"unit": "x.norm() + 1e-4", "forward": "x", "region": "net(x)"}
    assert constants_in(tmp_path, **fine) == []


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ({"forward": "x + 1e-8"}, 16),
        ({"region": "net(x) + 1e-8"}, 20),
        ({"unit": "x.norm() + 1e-8", "forward": "unit(x)"}, 12),
        ({"unit": "x.norm() + 1e-8", "region": "unit(net(x))"}, 12),
    ],
    ids=["in a module", "in a region", "called by a module", "called in a region"],
)
def test_numbers_where_the_model_computes_are_found(tmp_path: Path, fault: dict[str, str], line: int) -> None:
    fine = {"unit": "x.norm() + 1e-4", "forward": "x", "region": "net(x)"}
    assert constants_in(tmp_path, **{**fine, **fault}) == [("eps lost", line)]


def constants_in(folder: Path, **parts: str) -> list[tuple[str, int]]:
    file = folder / "train.py"
    file.write_text(SCRIPT.format(**parts))
    found = lint_script(file, torch.float16)
    return [(finding.kind, finding.source.line) for finding in found if finding.source and finding.kind == "eps lost"]
