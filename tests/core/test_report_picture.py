"""The picture of exponents shows the right numbers at the right places."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mezzo.errors import OptionError
from mezzo.report import OpRecord, Region, Report
from mezzo.report.numbers import Loss, Numbers
from mezzo.report.picture import _draw_all, _draw_modules, _figure, exponents_picture, numbers_by

pytest.importorskip("matplotlib", reason="the pictures need matplotlib, of the extra demo")


def op(path: str, phase: str, exponents: dict[int, int]) -> OpRecord:
    numbers = Numbers(sum(exponents.values()), 4.0, 1.0, losses={"float16": Loss(underflow=0.5)}, exponents=exponents)
    return OpRecord("mm", "fp32", path=(path,) if path else (), phase=phase, numbers=numbers)


REPORT = Report(
    "net",
    "torch",
    (
        Region(
            "net",
            records=(
                op("body.fc", "forward", {0: 3, 1: 1}),
                op("head", "forward", {1: 4}),
                OpRecord("mm", "fp32", path=("head",)),
                op("bodyguard", "recomputation", {-30: 4}),
                op("", "optimizer", {9: 4}),
                op("body.fc", "backward", {-20: 2, 20: 2}),
            ),
        ),
    ),
)


def test_numbers_are_added_up_by_what_they_are_numbers_of() -> None:
    found = numbers_by(REPORT)
    assert [*found] == [""]
    assert {kind: dict(one.exponents) for kind, one in found[""].items()} == {
        "activations": {-30: 4, 0: 3, 1: 5},
        "gradients": {-20: 2, 20: 2},
    }


def test_numbers_are_added_up_by_module() -> None:
    found = numbers_by(REPORT, per_module=True)
    assert {name: [*kinds] for name, kinds in found.items()} == {
        "body.fc": ["activations", "gradients"],
        "head": ["activations"],
        "bodyguard": ["activations"],
    }


def test_a_module_is_that_and_what_is_inside_of_it() -> None:
    assert [*numbers_by(REPORT, per_module=True, module="body")] == ["body.fc"]


def test_the_bars_are_the_shares_and_stand_where_they_belong() -> None:
    figure = _figure(6, 4)
    _draw_all(figure, numbers_by(REPORT)[""])
    activations, gradients = figure.axes

    def bars(panel: Any) -> dict[float, float]:
        return {round(bar.get_x(), 6): bar.get_height() for bar in panel.containers[0]}

    assert bars(activations) == pytest.approx({-30: 100 / 3, 0: 25.0, 1: 125 / 3})
    assert bars(gradients) == {-20: 50.0, 20: 50.0}
    assert activations.get_xlim() == gradients.get_xlim() == (-32, 23)
    assert "float16: to zero 50%" in activations.get_title(loc="left")
    assert {text.get_text() for text in activations.texts} == {"float16", "bfloat16"}


def test_the_strips_are_the_ranges_of_the_formats() -> None:
    figure = _figure(6, 4)
    _draw_all(figure, numbers_by(REPORT)[""])
    strips = [patch for patch in figure.axes[0].patches if patch not in figure.axes[0].containers[0].patches]
    spans = {(round(strip.get_x()), round(strip.get_x() + strip.get_width())) for strip in strips}
    # float16 from its subnormal numbers, from its normal ones; bfloat16 is wider than what is shown.
    assert spans == {(-24, -14), (-14, 16), (-32, 23)}


def test_each_module_has_a_row() -> None:
    figure = _figure(6, 4)
    _draw_modules(figure, numbers_by(REPORT, per_module=True))
    activations, gradients = figure.axes[:2]
    assert [label.get_text() for label in activations.get_yticklabels()] == ["body.fc", "head", "bodyguard"]
    cells, start = activations.images[0].get_array(), -32
    assert (cells[0][-start], cells[0][1 - start], cells[1][1 - start], cells[2][-30 - start]) == (75, 25, 100, 100)
    assert gradients.images[0].get_array()[0].sum() == 100
    assert gradients.images[0].get_array()[1:].sum() == 0


@pytest.mark.parametrize("per_module", [False, True], ids=["whole", "per module"])
@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".SVG", b"<?xml"), (".pdf", b"%PDF")])
def test_the_file_is_of_the_kind_that_its_name_says(
    tmp_path: Path, suffix: str, start: bytes, per_module: bool
) -> None:
    written = exponents_picture(REPORT, str(tmp_path / f"picture{suffix}"), per_module=per_module)
    assert written == tmp_path / f"picture{suffix}"
    assert written.read_bytes().startswith(start)


def test_numbers_that_are_all_zero_can_be_drawn(tmp_path: Path) -> None:
    zeros = OpRecord("mm", "fp32", numbers=Numbers(3, 0.0, 0.0))
    report = Report("zeros", "torch", (Region("zeros", records=(zeros,)),))
    for per_module in (False, True):
        assert exponents_picture(report, tmp_path / "zeros.png", per_module=per_module).stat().st_size > 1000


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"written as \.png, \.svg, \.pdf, got 'picture\.jpg'; give the file"):
        exponents_picture(REPORT, tmp_path / "picture.jpg")


def test_a_report_without_numbers_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"The report 'net' has no numbers to draw; make it with numerics=True"):
        exponents_picture(Report("net", "torch"), tmp_path / "picture.png")
    with pytest.raises(OptionError, match=r"no numbers of the module 'tail' to draw; .* or name another one"):
        exponents_picture(REPORT, tmp_path / "picture.png", module="tail")
    assert [*tmp_path.iterdir()] == []


def test_the_module_is_imported_without_matplotlib_and_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from mezzo.report import *; from mezzo.report.numbers import Numbers\n"
        "from mezzo.report.picture import exponents_picture\n"
        "op = OpRecord('mm', 'fp32', numbers=Numbers(1, 1.0, 1.0, exponents={0: 1}))\n"
        "try: exponents_picture(Report('net', 'torch', (Region('net', records=(op,)),)), 'never.png')\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == 'Pictures need matplotlib, which is not installed: pip install "mezzo[demo]".\n'
