"""The table of what a framework cannot meet speaks of tests that are there."""

from __future__ import annotations

import pytest

from . import test_dtypes, test_regions, test_scaling, test_threads
from .unmet import UNMET, Unmet


@pytest.mark.parametrize("unmet", UNMET, ids=lambda unmet: f"{unmet.backend}-{unmet.test}")
def test_what_cannot_be_met_is_a_test_and_has_a_cause(unmet: Unmet) -> None:
    found = [getattr(module, unmet.test, None) for module in (test_dtypes, test_regions, test_scaling, test_threads)]
    assert any(found), "no test has this name"
    assert len(unmet.cause.split()) > 5


@pytest.mark.parametrize("name", ["torch", "tensorplay"])
def test_an_adapter_for_eager_code_meets_everything(name: str) -> None:
    assert name not in {unmet.backend for unmet in UNMET}
