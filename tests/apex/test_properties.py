"""The options of the levels: their defaults, what may be overridden, and what the errors say."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mezzo.apex.amp._amp_state import _amp_state
from mezzo.apex.amp.properties import OPT_LEVELS, describe, resolve
from mezzo.errors import AmpError, AmpOptionError

HALF, LOW, FULL = torch.float16, torch.bfloat16, torch.float32
NAMES = ["enabled", "opt_level", "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32"]
NAMES += ["master_weights", "loss_scale"]


@pytest.fixture
def printing() -> Iterator[None]:
    """Have options that do not go together printed."""
    _amp_state.hard_override = True
    yield
    _amp_state.hard_override = False


def values(properties: Any) -> list[Any]:
    return [properties.options[name] for name in NAMES]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("O0", [True, "O0", FULL, False, None, False, 1.0]),
        ("O1", [True, "O1", None, True, None, None, "dynamic"]),
        ("O2", [True, "O2", HALF, False, True, True, "dynamic"]),
        ("O3", [True, "O3", HALF, False, False, False, 1.0]),
    ],
)
@pytest.mark.parametrize("dtype", [None, HALF])
def test_the_defaults_are_those_of_apex(level: str, expected: list[Any], dtype: torch.dtype | None) -> None:
    defaults, final = resolve(level, dict.fromkeys(NAMES), dtype)
    assert values(defaults) == values(final) == values(OPT_LEVELS[level].defaults(HALF)) == expected
    assert list(final.options) == NAMES
    assert [getattr(final, name) for name in NAMES] == expected


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("O0", [True, "O0", FULL, False, None, False, 1.0]),
        ("O1", [True, "O1", None, True, None, None, 1.0]),
        ("O2", [True, "O2", LOW, False, True, True, 1.0]),
        ("O3", [True, "O3", LOW, False, False, False, 1.0]),
    ],
)
def test_in_bfloat16_losses_are_not_scaled(level: str, expected: list[Any]) -> None:
    assert [values(each) for each in resolve(level, {}, LOW)] == [expected, expected]


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("dtype", [None, HALF, LOW])
def test_a_low_cast_model_type_is_the_lower_precision(level: str, dtype: torch.dtype | None) -> None:
    assert values(resolve(level, {"cast_model_type": LOW}, dtype)[1]) == values(OPT_LEVELS[level].defaults(LOW))
    assert values(resolve(level, {"cast_model_type": HALF}, dtype)[1]) == values(OPT_LEVELS[level].defaults(HALF))


def test_defaults_and_final_options_are_two_objects() -> None:
    defaults, final = resolve("O2", {"loss_scale": 8}, None)
    final.master_weights = False
    assert (defaults.loss_scale, defaults.master_weights) == ("dynamic", True)
    assert (final.loss_scale, final.master_weights) == (8.0, False)
    assert resolve("O2", {}, None)[1].master_weights is True


@pytest.mark.parametrize(
    ("level", "overrides", "name", "expected"),
    [
        ("O0", {"loss_scale": "dynamic"}, "loss_scale", "dynamic"),
        ("O0", {"master_weights": True}, "master_weights", True),
        ("O0", {"keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32", False),
        ("O0", {"cast_model_type": False}, "cast_model_type", False),
        ("O1", {"patch_torch_functions": False}, "patch_torch_functions", False),
        ("O1", {"cast_model_type": FULL}, "cast_model_type", FULL),
        ("O1", {"cast_model_type": False}, "cast_model_type", False),
        ("O1", {"loss_scale": 128}, "loss_scale", 128.0),
        ("O1", {"enabled": False}, "enabled", False),
        ("O2", {"loss_scale": "128.0"}, "loss_scale", 128.0),
        ("O2", {"loss_scale": torch.tensor(4.0)}, "loss_scale", 4.0),
        ("O2", {"keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32", True),
        ("O2", {"keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32", False),
        ("O2", {"master_weights": "False"}, "master_weights", False),
        ("O2", {"master_weights": 0}, "master_weights", False),
        ("O2", {"patch_torch_functions": False}, "patch_torch_functions", False),
        ("O2", {"cast_model_type": torch.float64}, "cast_model_type", torch.float64),
        ("O3", {"master_weights": True}, "master_weights", True),
        ("O3", {"keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32", True),
        ("O3", {"opt_level": "O3"}, "opt_level", "O3"),
    ],
)
def test_what_may_be_overridden(level: str, overrides: dict[str, Any], name: str, expected: Any) -> None:
    defaults, final = resolve(level, overrides, None)
    found = getattr(final, name)
    assert found == expected
    assert type(found) is type(expected)
    same = [each for each in NAMES if each != name]
    assert [final.options[each] for each in same] == [defaults.options[each] for each in same]


@pytest.mark.parametrize(
    ("level", "overrides", "text"),
    [
        ("O1", {"cast_model_type": HALF}, r"cast_model_type=torch.float16 does not go with O1.*opt_level='O2' or 'O3'"),
        ("O0", {"patch_torch_functions": True}, "does not go with O0: only O1 casts around functions.*opt_level='O1'"),
        ("O2", {"patch_torch_functions": True}, "does not go with O2"),
        ("O3", {"patch_torch_functions": "True"}, "does not go with O3"),
        ("O1", {"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True does not go with O1.*Leave it out"),
        ("O1", {"keep_batchnorm_fp32": False}, "keep_batchnorm_fp32=False does not go with O1"),
        ("O1", {"keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32='True' does not go with O1"),
        ("O1", {"master_weights": True}, "master_weights=True does not go with O1.*opt_level='O2'"),
        ("O1", {"master_weights": False}, "master_weights=False does not go with O1"),
    ],
)
def test_options_that_do_not_go_with_the_level_raise(level: str, overrides: dict[str, Any], text: str) -> None:
    with pytest.raises(AmpError, match=text) as caught:
        resolve(level, overrides, None)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(
    ("level", "name", "value", "kept"),
    [
        ("O1", "cast_model_type", HALF, HALF),
        ("O2", "patch_torch_functions", True, True),
        ("O1", "keep_batchnorm_fp32", "True", True),
        ("O1", "master_weights", False, False),
    ],
)
@pytest.mark.usefixtures("printing")
def test_with_hard_override_they_are_printed_and_set(
    level: str, name: str, value: Any, kept: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    _, final = resolve(level, {name: value}, None)
    printed = capsys.readouterr().out
    assert f"does not go with {level}" in printed
    assert printed.startswith("Warning")
    assert getattr(final, name) is kept


@pytest.mark.parametrize(
    ("overrides", "text", "kind"),
    [
        ({"keep_batchnorm_fp32": "None"}, "keep_batchnorm_fp32 is True, False or None.*got 'None'", AssertionError),
        ({"keep_batchnorm_fp32": 1}, "keep_batchnorm_fp32 is True, False or None.*got 1", AssertionError),
        ({"keep_batchnorm_fp32": "true"}, "one of the strings 'True' and 'False'; got 'true'", AssertionError),
        ({"master_weights": "no"}, "master_weights is True, False or None.*got 'no'", ValueError),
        ({"master_weights": 2}, "master_weights is True, False or None.*got 2", ValueError),
        ({"enabled": "off"}, "enabled is True, False or None.*got 'off'", ValueError),
        ({"loss_scale": "Dynamic"}, "loss_scale is 'dynamic', spelled so, or a positive number.*'Dynamic'", ValueError),
        ({"loss_scale": "abc"}, "got 'abc'", ValueError),
        ({"loss_scale": [1]}, r"got \[1\]", ValueError),
        ({"loss_scale": 0}, "a positive number.*got 0", ValueError),
        ({"loss_scale": "-1"}, "got '-1'", ValueError),
        ({"loss_scale": float("inf")}, "got inf", ValueError),
        ({"loss_scale": float("nan")}, "got nan", ValueError),
        ({"cast_model_type": "float16"}, "cast_model_type is one of torch.float64.*got 'float16'", ValueError),
        ({"cast_model_type": torch.int8}, "or False for a model that is not cast; got torch.int8", ValueError),
        ({"cast_model_type": 0}, "got 0", ValueError),
        ({"num_losses": 2}, "no option 'num_losses'; its options are enabled, opt_level", ValueError),
    ],
)
def test_values_that_are_not_allowed_raise(overrides: dict[str, Any], text: str, kind: type[Exception]) -> None:
    with pytest.raises(AmpOptionError, match=text) as caught:
        resolve("O2", overrides, None)
    assert isinstance(caught.value, kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, "bfloat16"])
def test_the_lower_precision_is_one_of_two(dtype: Any) -> None:
    with pytest.raises(AmpOptionError, match=r"dtype is torch.float16 or torch.bfloat16, got"):
        resolve("O1", {}, dtype)


@pytest.mark.parametrize(
    ("level", "hint"),
    [
        ("00", "begins with a zero: write 'O0'"),
        ("01", "begins with a zero: write 'O1'"),
        ("02", "begins with a zero: write 'O2'"),
        ("o1", "Did you mean 'O1'"),
        ("2", "Did you mean 'O2'"),
        (3, "Did you mean 'O3'"),
        ("O4", r"got 'O4'\.$"),
        ("", r"got ''\.$"),
        (None, "got None. Where it comes from the command line, give the option a default"),
    ],
)
def test_a_level_that_is_none_is_refused_with_a_hint(level: Any, hint: str) -> None:
    with pytest.raises(AmpOptionError, match=hint) as caught:
        resolve(level, {}, None)
    assert "with the capital letter O and not a zero" in str(caught.value)


def test_what_is_written_later_is_checked_too() -> None:
    _, final = resolve("O1", {}, None)
    with pytest.raises(AmpError, match="does not go with O1"):
        final.master_weights = True
    assert final.master_weights is None
    final.loss_scale = "64"
    assert final.options["loss_scale"] == 64.0
    with pytest.raises(AttributeError, match="there is no 'loss_scal'"):
        _ = final.loss_scal  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'loss_scal' cannot be set"):
        final.loss_scal = 1.0  # type: ignore[attr-defined]


def test_options_can_be_pickled() -> None:
    _, final = resolve("O2", {"loss_scale": 8}, None)
    again = pickle.loads(pickle.dumps(final))
    assert again.options == final.options
    assert repr(again) == repr(final)


def test_the_description_has_the_level_and_both_sets_of_options_in_22_columns() -> None:
    lines = describe(*resolve("O2", {"loss_scale": "128"}, None))
    assert lines[0].startswith("Optimization level O2: weights and inputs in lower precision")
    assert lines[2:9] == [
        "enabled                : True",
        "opt_level              : O2",
        "cast_model_type        : torch.float16",
        "patch_torch_functions  : False",
        "keep_batchnorm_fp32    : True",
        "master_weights         : True",
        "loss_scale             : dynamic",
    ]
    assert "overrides" in lines[9]
    assert lines[11:17] == lines[2:8]
    assert lines[17:] == ["loss_scale             : 128.0"]
