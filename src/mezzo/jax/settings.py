"""What autocast was asked for, checked, as a frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from mezzo.builtin import PolicyLike, resolve_policy
from mezzo.decision import LOW_DTYPES, CastPolicy
from mezzo.errors import DtypeError, OptionError, near
from mezzo.policy import Policy

from .values import LOW, dtype_name

__all__ = ["CustomVjp", "Settings", "low_dtype_name", "make_settings"]

CustomVjp = str | Mapping[str, str]
"""What ``custom_vjp=`` takes: a word for all functions, or one for each by name."""

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16"}

_ALLOWED = {
    "carry": ("pin", "fixpoint"),
    "while_": ("off", "body"),
    "custom_vjp": ("opaque", "enter"),
    "bias": ("adapt", "promote"),
    "outputs": ("traced", "flow", "float32"),
}


@dataclass(frozen=True)
class Settings:
    """What one application of `mezzo.jax.autocast` was asked for; its arguments, checked.

    Attributes:
        policy: Which primitive has which rule.
        dtype: ``"bfloat16"`` or ``"float16"``.
        carry: How dtypes of loop carries are chosen.
        while_: Whether bodies of `jax.lax.while_loop` are entered.
        custom_vjp: A word for all functions with a custom VJP, or pairs of name and word.
        bias: Whether stored float32 operands that are broadcast adapt to a low activation.
        outputs: What happens to the dtypes of results.
    """

    policy: Policy
    dtype: str = "bfloat16"
    carry: Literal["pin", "fixpoint"] = "pin"
    while_: Literal["off", "body"] = "off"
    custom_vjp: str | tuple[tuple[str, str], ...] = "opaque"
    bias: Literal["adapt", "promote"] = "adapt"
    outputs: Literal["traced", "flow", "float32"] = "traced"

    @cached_property
    def low(self) -> Any:
        """The lower-precision dtype as NumPy's."""
        return LOW[self.dtype]

    @cached_property
    def _rules(self) -> dict[str, CastPolicy]:
        return {}

    def rule(self, primitive: str) -> CastPolicy:
        """Give the rule of a primitive by its canonical name."""
        found = self._rules.get(primitive)
        if found is None:
            # "device" cannot be: there is one table for all devices, and no policy for JAX leaves anything to it.
            found = self._rules[primitive] = CastPolicy(self.policy.rule_of(primitive, self.dtype))
        return found

    def enters_vjp(self, name: str) -> bool:
        """Say whether a function with a custom VJP is entered."""
        if isinstance(self.custom_vjp, str):
            return self.custom_vjp == "enter" or self.rule("custom_vjp_call") is CastPolicy.FALLTHROUGH
        return dict(self.custom_vjp).get(name, "opaque") == "enter"

    def enters_while(self) -> bool:
        """Say whether the bodies of while loops are entered."""
        return self.while_ == "body" or self.rule("while") is CastPolicy.FALLTHROUGH


def make_settings(
    dtype: Any,
    policy: PolicyLike | None,
    *,
    carry: str,
    while_: str,
    custom_vjp: CustomVjp,
    bias: str,
    outputs: str,
) -> Settings:
    """Check the arguments of `mezzo.jax.autocast`.

    Returns:
        The settings.

    Raises:
        DtypeError: The dtype is not bfloat16 or float16.
        OptionError: An option has a value that is not allowed.
        PolicyError, UnknownPolicyError, UnknownOpError, PolicyFileError: As `mezzo.builtin.resolve_policy`.
    """
    words = {"carry": carry, "while_": while_, "bias": bias, "outputs": outputs}
    for option, word in words.items():
        _check_word(option, word)
    return Settings(
        policy=resolve_policy("default" if policy is None else policy, framework="jax"),
        dtype=low_dtype_name(dtype),
        custom_vjp=_check_custom_vjp(custom_vjp),
        **words,  # type: ignore[arg-type]  # each was compared with its words
    )


def low_dtype_name(dtype: Any) -> str:
    """Give the name of a lower-precision dtype.

    Args:
        dtype: ``"bfloat16"`` or ``"float16"``, or the dtype or scalar type of that name (``jnp.bfloat16``).

    Returns:
        Its name.

    Raises:
        DtypeError: It is something else.
    """
    if hasattr(dtype, "shape") and hasattr(dtype, "dtype"):
        msg = "autocast got an array for its dtype. It transforms a function, which is called then: autocast(fn)(x)."
        raise DtypeError(msg)
    name = dtype if isinstance(dtype, str) else _name(dtype)
    if name not in LOW_DTYPES:
        hint = f" Did you mean {_SHORT[name]!r}?" if name in _SHORT else near(name, LOW_DTYPES)
        msg = f"autocast computes in {' or '.join(LOW_DTYPES)}, got {dtype!r}.{hint}"
        if name == "float32":
            msg += " For float32 leave autocast away: enabled=False."
        raise DtypeError(msg)
    return name


def _name(dtype: Any) -> str:
    try:
        return dtype_name(np.dtype(dtype))
    except TypeError:
        return str(dtype)


def _check_word(option: str, word: object, where: str = "") -> None:
    allowed = _ALLOWED[option]
    if not isinstance(word, str) or word not in allowed:
        hint = near(str(word), allowed)
        msg = f"{option}={word!r} is not allowed{where}; allowed are {', '.join(map(repr, allowed))}.{hint}"
        raise OptionError(msg)


def _check_custom_vjp(given: CustomVjp) -> str | tuple[tuple[str, str], ...]:
    if not isinstance(given, Mapping):
        if not isinstance(given, str):
            msg = f"custom_vjp takes 'opaque', 'enter', or a mapping from function name to one of these, got {given!r}."
            raise OptionError(msg)
        _check_word("custom_vjp", given)
        return given
    for name, word in given.items():
        if not isinstance(name, str):
            msg = f"custom_vjp maps names of functions to words; {name!r} is no name. Pass its __name__."
            raise OptionError(msg)
        _check_word("custom_vjp", word, f" for the function {name!r}")
    return tuple(sorted(given.items()))
