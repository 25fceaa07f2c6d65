"""What the options of `mezzo.apex.amp.initialize` may be: one parser for each.

A parser gives the value to store, for a value that came and the level. Values from the command line may come as strings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch

from mezzo.apex.amp._amp_state import warn_or_err
from mezzo.errors import AmpOptionError

__all__ = ["LEVELS", "LOW", "PARSERS"]

LEVELS = ("O0", "O1", "O2", "O3")
LOW = (torch.float16, torch.bfloat16)
_CASTS = (torch.float64, torch.float32, *LOW)


def _opt_level(value: object, _level: str | None) -> str:
    if isinstance(value, str) and value in LEVELS:
        return value
    levels = ", ".join(map(repr, LEVELS))
    hint = ""
    text = str(value).upper()
    if isinstance(value, str) and text[:1] == "0" and "O" + text[1:] in LEVELS:
        hint = f" This one begins with a zero: write {'O' + text[1:]!r}."
    elif text in LEVELS or "O" + text in LEVELS:
        hint = f" Did you mean {'O' + text[-1]!r}?"
    elif value is None:
        hint = " Where it comes from the command line, give the option a default, such as 'O1'."
    msg = f"opt_level is one of {levels}, with the capital letter O and not a zero; got {value!r}.{hint}"
    raise AmpOptionError(msg)


def _cast_model_type(value: object, level: str | None) -> torch.dtype | Literal[False] | None:
    if value is not None and value is not False and not (isinstance(value, torch.dtype) and value in _CASTS):
        allowed = ", ".join(map(str, _CASTS))
        msg = f"cast_model_type is one of {allowed}, or False for a model that is not cast; got {value!r}."
        raise AmpOptionError(msg)
    found: Any = value
    if level == "O1" and found and found is not torch.float32:
        warn_or_err(
            f"cast_model_type={found} does not go with O1, which casts around functions and leaves the weights in float32. "
            "Leave it out, or use opt_level='O2' or 'O3' to cast the model."
        )
    return found  # type: ignore[no-any-return]


def _patch_torch_functions(value: object, level: str | None) -> bool | None:
    found = _truth("patch_torch_functions", value)
    if found and level != "O1":
        warn_or_err(
            f"patch_torch_functions=True does not go with {level}: only O1 casts around functions. Leave it out, or use "
            "opt_level='O1'."
        )
    return found


def _keep_batchnorm_fp32(value: object, level: str | None) -> bool | None:
    if level == "O1" and value is not None:
        warn_or_err(
            f"keep_batchnorm_fp32={value!r} does not go with O1, whose weights are all float32, batch norms' too. Leave it "
            "out (None), or use opt_level='O2' or 'O3'."
        )
    return _truth("keep_batchnorm_fp32", value, numbers=False)


def _master_weights(value: object, level: str | None) -> bool | None:
    if level == "O1" and value is not None:
        warn_or_err(
            f"master_weights={value!r} does not go with O1, whose weights are float32 themselves. Leave it out (None), or "
            "use opt_level='O2'."
        )
    return _truth("master_weights", value)


def _enabled(value: object, _level: str | None) -> bool:
    return bool(_truth("enabled", value))


def _loss_scale(value: object, _level: str | None) -> float | Literal["dynamic"]:
    if isinstance(value, str) and value == "dynamic":
        return "dynamic"
    given: Any = value
    try:
        scale = float(given)
    except (TypeError, ValueError):
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0):
        msg = f"loss_scale is 'dynamic', spelled so, or a positive number, also as a string such as '128.0'; got {value!r}."
        raise AmpOptionError(msg)
    return scale


def _truth(name: str, value: object, *, numbers: bool = True) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and value in ("True", "False"):
        return value == "True"
    if numbers and isinstance(value, int) and value in (0, 1):
        return bool(value)
    msg = f"{name} is True, False or None, or one of the strings 'True' and 'False'; got {value!r}."
    raise AmpOptionError(msg)


PARSERS: Mapping[str, Callable[[object, str | None], Any]] = MappingProxyType(
    {
        "enabled": _enabled,
        "opt_level": _opt_level,
        "cast_model_type": _cast_model_type,
        "patch_torch_functions": _patch_torch_functions,
        "keep_batchnorm_fp32": _keep_batchnorm_fp32,
        "master_weights": _master_weights,
        "loss_scale": _loss_scale,
    }
)
"""By the name of the option."""
