"""The options of `mezzo.apex.amp.initialize`: what each level sets, what may be overridden, and what goes together.

The names, the levels and their defaults are those of Apex. Values from the command line may come as strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from mezzo.apex.amp.option_values import LOW, PARSERS
from mezzo.errors import AmpOptionError

__all__ = ["OPT_LEVELS", "OptLevel", "Properties", "describe", "resolve"]

_NAMES = (
    "enabled",
    "opt_level",
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)


class Properties:
    """The seven options that are in force, as attributes that can be read and written.

    A value that is written is checked, alone and against ``opt_level``. Options that do not go with the level raise
    `mezzo.errors.AmpError`; they are printed instead where ``amp._amp_state.hard_override`` is set. Not to be written to by
    two threads at the same time.

    Args:
        values: The options by name; they are taken as they are. None: those before ``initialize``.

    Attributes:
        enabled: Whether anything is done at all.
        opt_level: ``"O0"`` to ``"O3"``; None before ``initialize``.
        cast_model_type: The dtype of the model's weights; None or False if they are not cast.
        patch_torch_functions: Whether functions cast their arguments, which O1 does.
        keep_batchnorm_fp32: Whether batch norms stay float32 in a model that is cast.
        master_weights: Whether the optimizers hold float32 masters.
        loss_scale: ``"dynamic"``, or a fixed scale.

    Example:
        >>> options, _ = resolve("O2", {}, torch.float16)
        >>> options.loss_scale = "128.0"
        >>> options.loss_scale
        128.0
    """

    options: dict[str, Any]
    enabled: bool
    opt_level: str | None
    cast_model_type: torch.dtype | Literal[False] | None
    patch_torch_functions: bool | None
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | Literal["dynamic"]

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        before: dict[str, Any] = {**dict.fromkeys(_NAMES), "enabled": False, "loss_scale": 1.0}
        self.__dict__["options"] = {**before, **(values or {})}

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name not in options:
            msg = f"the options of amp.initialize are {', '.join(_NAMES)}; there is no {name!r}."
            raise AttributeError(msg)
        return options[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            msg = f"the options of amp.initialize are {', '.join(_NAMES)}; {name!r} cannot be set."
            raise AttributeError(msg)
        self.options[name] = PARSERS[name](value, self.options["opt_level"])

    def __repr__(self) -> str:
        return f"Properties({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


@dataclass(frozen=True)
class OptLevel:
    """A level.

    Attributes:
        brief: What it does, in a line.
        values: Its defaults in float16.
    """

    brief: str
    values: Mapping[str, Any]

    def defaults(self, dtype: torch.dtype) -> Properties:
        """Give the options that the level sets.

        Args:
            dtype: The lower precision. bfloat16 has float32's range, so its losses are not scaled.

        Returns:
            A new object for each call.
        """
        values = dict(self.values)
        if values["cast_model_type"] is torch.float16:
            values["cast_model_type"] = dtype
        if dtype is torch.bfloat16:
            values["loss_scale"] = 1.0
        return Properties(values)


_APEX = (
    ("O0", "float32 throughout, to compare with.", (torch.float32, False, None, False, 1.0)),
    ("O1", "float32 weights; each function casts what it is given.", (None, True, None, None, "dynamic")),
    (
        "O2",
        "weights and inputs in lower precision; float32 batch norms, and float32 masters in the optimizers.",
        (torch.float16, False, True, True, "dynamic"),
    ),
    ("O3", "everything in lower precision, without masters.", (torch.float16, False, False, False, 1.0)),
)

OPT_LEVELS: Mapping[str, OptLevel] = MappingProxyType(
    {
        name: OptLevel(brief, MappingProxyType(dict(zip(_NAMES, (True, name, *values), strict=True))))
        for name, brief, values in _APEX
    }
)
"""The levels by name."""


def resolve(
    opt_level: object, overrides: Mapping[str, object], dtype: torch.dtype | None
) -> tuple[Properties, Properties]:
    """Give what a level sets, and what is in force once the caller's options are laid over it.

    Args:
        opt_level: ``"O0"``, ``"O1"``, ``"O2"`` or ``"O3"``, with the letter O.
        overrides: Options by name; those that are None do not count. Strings, as from the command line, are taken for
            numbers and truth values.
        dtype: The lower precision, ``torch.float16`` or ``torch.bfloat16``. None: that of ``cast_model_type`` at O2 and O3
            where it is one, else float16. What ``cast_model_type`` says wins.

    Returns:
        The defaults and the final options, two objects.

    Raises:
        AmpOptionError: A value is not allowed.
        AmpError: An option does not go with the level.

    Example:
        >>> defaults, final = resolve("O2", {"loss_scale": "128.0", "keep_batchnorm_fp32": None}, None)
        >>> defaults.loss_scale, final.loss_scale, final.keep_batchnorm_fp32
        ('dynamic', 128.0, True)
    """
    level = OPT_LEVELS[PARSERS["opt_level"](opt_level, None)]
    unknown = [name for name in overrides if name not in _NAMES]
    if unknown:
        msg = f"amp.initialize has no option {unknown[0]!r}; its options are {', '.join(_NAMES)}."
        raise AmpOptionError(msg)
    low = _lower_precision(level, overrides.get("cast_model_type"), dtype)
    final = level.defaults(low)
    for name in _NAMES:
        if overrides.get(name) is not None:
            setattr(final, name, overrides[name])
    return level.defaults(low), final


def describe(defaults: Properties, final: Properties) -> list[str]:
    """Give the lines that ``initialize`` prints.

    Args:
        defaults: What the level sets.
        final: What is in force.

    Returns:
        The level with a line on what it does, its options, and the options after overrides: names in 22 columns.

    Example:
        >>> describe(*resolve("O1", {}, None))[2]
        'enabled                : True'
    """
    level = defaults.opt_level or "O0"
    return [
        f"Optimization level {level}: {OPT_LEVELS[level].brief}",
        "Its defaults are:",
        *_lines(defaults),
        "Options of the call that are not None take their places (overrides).",
        "With overrides, the options are:",
        *_lines(final),
    ]


def _lines(properties: Properties) -> list[str]:
    return [f"{name:22} : {value}" for name, value in properties.options.items()]


def _lower_precision(level: OptLevel, cast_model_type: object, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None and dtype not in LOW:
        msg = f"dtype is torch.float16 or torch.bfloat16, got {dtype!r}."
        raise AmpOptionError(msg)
    casts_low = level.values["cast_model_type"] in LOW
    if casts_low and isinstance(cast_model_type, torch.dtype) and cast_model_type in LOW:
        return cast_model_type
    return torch.float16 if dtype is None else dtype
