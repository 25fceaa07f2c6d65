"""What a policy takes beside its rules: a default for ops it does not list, repairs, and a region's dtype by name."""

from __future__ import annotations

from typing import Literal

from .decision import LOW_DTYPES, CastPolicy
from .errors import PolicyError, near

__all__ = ["DEVICE", "default_rule", "low_name", "mends"]

DEVICE: Literal["device"] = "device"
"""The value of `Policy.default` that keeps the device's own rule for ops that the policy does not list."""

_EAGER = (CastPolicy.FALLTHROUGH, CastPolicy.PROMOTE, CastPolicy.FP32, CastPolicy.LOWER_PRECISION_FP)
_DEFAULTS = {
    "torch": _EAGER,
    "tensorplay": _EAGER,
    "jax": (
        CastPolicy.OPAQUE,
        CastPolicy.FALLTHROUGH,
        CastPolicy.PROMOTE,
        CastPolicy.FP32,
        CastPolicy.LOWER_PRECISION_FP,
    ),
}


def default_rule(value: object, framework: str) -> CastPolicy | Literal["device"]:
    """Check a policy's default.

    Args:
        value: What the caller gave; None for the usual one, which is opaque for JAX and fallthrough for the others.
        framework: Whose ops the policy is about.

    Returns:
        The cast policy, or ``"device"``.

    Raises:
        PolicyError: It cannot be a default for this framework.
    """
    allowed = _DEFAULTS[framework]
    if value is None:
        return allowed[0]
    if value == DEVICE and framework != "jax":
        return DEVICE
    if value == DEVICE:
        msg = (
            "the default 'device' is for PyTorch, whose devices have tables of their own; for JAX, start from "
            "builtin_policy('default', framework='jax').override({...}), or in a file from base = 'default'."
        )
        raise PolicyError(msg)
    if value not in allowed:
        others = "" if framework == "jax" else f" and {DEVICE}"
        msg = f"{value} cannot be a policy's default; allowed are {', '.join(allowed)}{others}."
        raise PolicyError(msg)
    return CastPolicy(str(value))


def mends(repairs: object, framework: str) -> bool:
    """Check whether a policy mends calls that fail over dtypes.

    Args:
        repairs: True, False, or None for the usual value, which is False for JAX and True for the others.
        framework: Whose ops the policy is about.

    Returns:
        True or False.

    Raises:
        PolicyError: It is something else, or True for a framework that has nothing to mend.
    """
    if repairs is None:
        return framework != "jax"
    if not isinstance(repairs, bool):
        msg = f"a policy's repairs must be True or False, got {repairs!r}."
        raise PolicyError(msg)
    if repairs and framework == "jax":
        msg = f"repairs mend calls that PyTorch's autocast lets down; for {framework!r} leave them out, or give False."
        raise PolicyError(msg)
    return repairs


def low_name(low_dtype: object) -> str:
    """Give the name of a lower-precision dtype; frameworks' own are known by how they are written.

    Args:
        low_dtype: ``"bfloat16"``, ``"float16"``, or a framework's dtype of that name.

    Returns:
        The name.

    Raises:
        PolicyError: It is another dtype.
    """
    name = str(low_dtype).rpartition(".")[2].removesuffix("'>")  # jnp.bfloat16 is a class
    if name not in LOW_DTYPES:
        hint = near(str(low_dtype), LOW_DTYPES)
        msg = f"{low_dtype!r} is not a lower-precision dtype; allowed are {', '.join(LOW_DTYPES)}.{hint}"
        raise PolicyError(msg)
    return name
