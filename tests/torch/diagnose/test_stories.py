"""Each story in `examples/diagnose` goes wrong in lower precision only, and its cure cures it."""

from __future__ import annotations

import re

import pytest

from .stories import FOLDER, story

WRONG, SOUND = 0, 1

SAID = {
    "attention_logits": (
        r"loss nan, accuracy \d\.\d%, scale 6.1e-05",  # 2**16 halved 30 times: each step was skipped
        r"loss [01]\.\d+, accuracy (7|8)\d\.\d%, scale (1|3.28e\+04|6.55e\+04)",
    ),
    "variance": (r"loss 0\.6\d+, accuracy 7\d\.\d%", r"loss 0\.2\d+, accuracy 9\d\.\d%"),
    "tiny_gradients": (
        r"naming 0\.5\d+, drawing 0\.2\d+, decoder without gradients: 4 of 4",
        r"naming 0\.5\d+, drawing 0\.03\d+, decoder without gradients: 0 of 4",
    ),
    "log_of_zero": (
        r"[23]\d of 60 losses finite, the last nan",
        r"60 of 60 losses finite, the last 0\.1\d+, accuracy 8",
    ),
    "float32_custom_op": (r"loss 1\.0\d+, 4621 KiB of activations", r"loss 1\.0\d+, (2421|4839) KiB of activations"),
}
"""What a story says when it goes wrong, and when it does not."""


def told(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", [name, *arguments])
    capsys.readouterr()
    story(name).main()
    return capsys.readouterr().out


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize(
    ("arguments", "ending"),
    [((), WRONG), (("--cured",), SOUND), (("--dtype", "float32"), SOUND)],
    ids=["in lower precision", "cured", "in float32"],
)
def test_a_story_goes_wrong_in_lower_precision_and_its_cure_cures_it(
    name: str,
    arguments: tuple[str, ...],
    ending: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = told(name, capsys, monkeypatch, *arguments)
    assert re.match(SAID[name][ending], said), said
    assert not re.match(SAID[name][1 - ending], said), said


def test_every_story_is_told() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SAID)
