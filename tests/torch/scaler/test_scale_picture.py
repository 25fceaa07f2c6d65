"""The picture of a scale's history has its numbers in it, a log2 axis, and a mark at each step that was skipped."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzo.torch import GradScaler
from mezzo.torch.scaling.scale_history import ScaleHistory, ScaleRow
from mezzo.torch.scaling.scale_picture import scale_figure
from tests.packaging.test_isolation import imports

ROWS = [
    ScaleRow(10, 1024.0, False, 2.0),
    ScaleRow(11, 2048.0, True, float("inf")),
    ScaleRow(12, 1024.0, True, float("nan")),
    ScaleRow(13, 512.0, False, 0.5),
]


def points(artist: Any) -> list[tuple[float, float]]:
    pairs = artist.get_xydata() if hasattr(artist, "get_xydata") else artist.get_offsets()
    return [tuple(pair) for pair in pairs.tolist()]


def test_the_picture_has_the_rows_in_it() -> None:
    scale, norm = scale_figure(ROWS).axes
    assert points(scale.lines[0]) == [(10, 1024), (11, 2048), (12, 1024), (13, 512)]
    assert points(scale.collections[0]) == [(11, 2048), (12, 1024)]
    assert (scale.get_yscale(), scale.yaxis.get_transform().base) == ("log", 2)
    assert scale.get_title() == "2 of 4 steps skipped (x)"
    # A norm that is not finite has no place on an axis.
    assert points(norm.lines[0]) == [(10, 2), (13, 0.5)]
    assert norm.get_yscale() == "linear"  # they are less than two decades apart


@pytest.mark.parametrize("norm", [None, float("inf")])
def test_without_a_norm_there_is_one_panel(norm: float | None) -> None:
    assert len(scale_figure([ScaleRow(0, 8.0, False, norm)]).axes) == 1


def test_a_norm_of_zero_is_drawn_too() -> None:
    norm = scale_figure([ScaleRow(0, 8.0, False, 0.0), ScaleRow(1, 8.0, False, 3.0)]).axes[1]
    assert points(norm.lines[0]) == [(0, 0), (1, 3)]
    assert norm.get_yscale() == "linear"


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
@pytest.mark.parametrize("iterations", [0, 3])
def test_the_suffix_says_which_format(tmp_path: Path, suffix: str, start: bytes, iterations: int) -> None:
    scaler = GradScaler("cpu")
    history = ScaleHistory(scaler)
    scaler.scale(torch.ones(()))
    for _ in range(iterations):
        scaler.update()
    path = tmp_path / f"scale.{suffix}"
    history.plot(path)
    assert path.read_bytes().startswith(start)
    with pytest.raises(ValueError, match="'nothing' is not supported"):
        history.plot(str(tmp_path / "scale.nothing"))


@pytest.mark.parametrize(("norms", "scale"), [((1.14, 1.3), "linear"), ((0.5, 20.0), "linear"), ((0.02, 40.0), "log")])
def test_the_ticks_of_the_norms_are_plain_numbers(norms: tuple[float, ...], scale: str) -> None:
    rows = [ScaleRow(step, 8.0, False, norm) for step, norm in enumerate(norms)]
    figure = scale_figure(rows)
    figure.draw_without_rendering()
    axis = figure.axes[1].yaxis
    assert figure.axes[1].get_yscale() == scale
    labels = [label.get_text() for label in axis.get_ticklabels()]
    assert len(labels) >= 2
    assert all(re.fullmatch(r"-?[\d.]+(e[+-]\d+)?", label) for label in labels)
    assert {label.get_text() for label in axis.get_ticklabels(minor=True)} <= {""}


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib\.figure, .* run: pip install 'mezzo\[demo\]'$"):
        ScaleHistory(GradScaler("cpu")).plot("nowhere.png")


@pytest.mark.parametrize("name", ["scale_history", "scale_picture", "scale_recording"])
def test_matplotlib_is_imported_for_a_picture_only(name: str) -> None:
    found = imports(f"mezzo.torch.scaling.{name}", at_import=True)
    assert not [module for module in found if module.startswith("matplotlib")]
