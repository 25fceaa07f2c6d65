"""The page of a search in a whole script that broke off, or whose overflows a gradient scaler has answered."""

from __future__ import annotations

import pytest

from mezzo.cli.run_rounds import Rounds
from mezzo.report.nonfinite import NonFiniteReport

from .opened import Opened


@pytest.mark.parametrize(
    ("ended", "overcome", "title"),
    [
        ("KeyError", False, "12 ops ran before the script broke off; their results were finite"),
        ("", True, "12 ops, and nothing lasting that is not finite"),
        ("", False, "12 ops, all finite"),
    ],
)
def test_the_title_says_no_more_than_what_was_seen(opened: Opened, ended: str, overcome: bool, title: str) -> None:
    rounds = Rounds()
    if overcome:
        rounds.add(NonFiniteReport(None, (), 5), {1})
        rounds.made_step({1})
    window = opened(rounds.verdict(NonFiniteReport(None, (), 12), lasts=False, ended=ended))
    assert window.inner_text("h1") == title
