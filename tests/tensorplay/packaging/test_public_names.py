"""The public names of modules that need TensorPlay are there and documented, and the examples in docstrings are true."""

from __future__ import annotations

import pytest

from tests.packaging.docstrings import WITH_DOCTESTS, assert_examples_are_true
from tests.packaging.public_names import IMPORT_TENSORPLAY, assert_offers_are_documented, assert_says_what_is_public

WITH_EXAMPLES = [name for name in WITH_DOCTESTS if name in IMPORT_TENSORPLAY]


@pytest.mark.parametrize("name", IMPORT_TENSORPLAY)
def test_what_a_module_offers_is_there_and_has_a_docstring(name: str) -> None:
    assert_offers_are_documented(name)


@pytest.mark.parametrize("name", ["mezzo.tensorplay", "mezzo.tensorplay.cpu.amp", "mezzo.tensorplay.cuda.amp"])
def test_packages_say_what_is_public(name: str) -> None:
    assert_says_what_is_public(name)


def test_the_adapter_offers_what_tensorplay_documents_and_the_policies() -> None:
    import mezzo.tensorplay

    assert set(mezzo.tensorplay.__all__) >= {
        "autocast",
        "autocast_decorator",
        "custom_fwd",
        "custom_bwd",
        "is_autocast_available",
        "is_autocast_enabled",
        "get_autocast_dtype",
        "GradScaler",
        "active_policy",
        "get_default_policy",
        "set_default_policy",
    }


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_in_docstrings_are_true(name: str) -> None:
    assert_examples_are_true(name)


def test_every_module_with_public_functions_has_an_example() -> None:
    assert {
        "mezzo.tensorplay",
        "mezzo.tensorplay.autocast",
        "mezzo.tensorplay.contract",
        "mezzo.tensorplay.functions",
        "mezzo.tensorplay.policies",
        "mezzo.tensorplay.scaler",
    } <= set(WITH_EXAMPLES)
