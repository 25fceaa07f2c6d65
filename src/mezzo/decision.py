"""What a cast policy does to the dtypes of an op's inputs: the one pure function that every adapter follows.

Nothing here knows a framework; dtypes are their usual names (``"bfloat16"``). The adapters compute the same thing on
their own dtype objects for speed, and a test holds each of them to this function.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from .errors import PolicyError, near

__all__ = ["LOW_DTYPES", "CastPolicy", "eligible", "input_dtypes", "parse_cast_policy", "widest"]

LOW_DTYPES = ("bfloat16", "float16")
"""The lower-precision dtypes for which a rule may differ."""

# Words for dtypes, where a rule was asked for.
_MEANT = {
    **dict.fromkeys(("float32", "fp32", "f32", "float", "full"), "fp32"),
    **dict.fromkeys(("bfloat16", "float16", "bf16", "fp16", "half", "low", "lower"), "lower_precision_fp"),
}

_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}


class CastPolicy(StrEnum):
    """What autocast does with the inputs of an op before the op runs. The names are PyTorch's.

    Source: the cast policies of PyTorch's autocast (``ATen/autocast_mode.h``) and its accelerator guide. The last four
    are mezzo's.

    Example:
        >>> CastPolicy("fp32") is CastPolicy.FP32
        True
    """

    LOWER_PRECISION_FP = "lower_precision_fp"
    """Cast every eligible input to the region's dtype (bfloat16 or float16)."""
    FP32 = "fp32"
    """Cast every eligible input to float32."""
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    """Cast no input; ask the op for a float32 result through its ``dtype`` argument, unless the caller gave one."""
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    """Cast no input; call the overload of ``norm`` that takes a dtype, with float32."""
    PROMOTE = "promote"
    """Cast every eligible input to the widest dtype among them."""
    BANNED = "banned"
    """Raise, with advice."""
    BANNED_LOWER_PRECISION = "banned_lower_precision"
    """Raise, with advice, if an input is in lower precision (bfloat16, float16, float8); else run as it came."""
    FALLTHROUGH = "fallthrough"
    """Run in the dtypes that came in, and so do the ops inside a composite op."""
    OPAQUE = "opaque"
    """JAX only: run in exactly the dtypes that were traced."""


def parse_cast_policy(value: object) -> CastPolicy:
    """Turn a string into a `CastPolicy`.

    Args:
        value: A `CastPolicy` or its name.

    Returns:
        The cast policy.

    Raises:
        PolicyError: ``value`` is neither.

    Example:
        >>> parse_cast_policy("promote")
        <CastPolicy.PROMOTE: 'promote'>
    """
    if isinstance(value, str):
        try:
            return CastPolicy(value)
        except ValueError:
            pass
    allowed = [str(policy) for policy in CastPolicy]
    word = str(value).removeprefix("torch.").lower()
    hint = f" Did you mean {_MEANT[word]!r}?" if word in _MEANT else near(word, allowed)
    msg = f"{value!r} is not a cast policy; allowed are {', '.join(allowed)}.{hint}"
    raise PolicyError(msg)


def eligible(dtype: str) -> bool:
    """Say whether autocast may cast a tensor of this dtype.

    Eligible are the floating dtypes except float64, as PyTorch's page says: float64, complex, integer and boolean tensors
    are left alone in every region.

    Args:
        dtype: A dtype name such as ``"float32"``.

    Returns:
        True if a tensor of this dtype may be cast.

    Example:
        >>> eligible("bfloat16"), eligible("float64"), eligible("int64")
        (True, False, False)
    """
    return dtype in _BITS or dtype.startswith(("float8", "float4"))


def widest(dtypes: Sequence[str], low_dtype: str) -> str | None:
    """Find the dtype to which the ``promote`` policy casts.

    The order of the arguments has no influence. bfloat16 and float16 together promote to float32, since neither holds the
    other; float8 alone runs in the region's dtype, since no op computes in it.

    Args:
        dtypes: The dtype names of all inputs.
        low_dtype: The region's dtype.

    Returns:
        The common dtype, or None if no input is eligible.

    Example:
        >>> widest(["float16", "float32"], "bfloat16")
        'float32'
        >>> widest(["float16", "bfloat16"], "bfloat16")
        'float32'
    """
    found = {dtype for dtype in dtypes if eligible(dtype)}
    if not found:
        return None
    wide = {dtype for dtype in found if dtype in _BITS}
    if not wide:
        return low_dtype
    return wide.pop() if len(wide) == 1 else "float32"


def input_dtypes(policy: CastPolicy, dtypes: Sequence[str], low_dtype: str) -> tuple[str, ...]:
    """Give the dtypes in which an op's inputs reach it under a cast policy.

    Args:
        policy: The rule of the op.
        dtypes: The dtype names of the tensors that came, in order.
        low_dtype: The region's dtype, ``"bfloat16"`` or ``"float16"``.

    Returns:
        One dtype name per input. For ``fp32_set_opt_dtype`` and ``fp32_append_dtype`` these are the inputs' own: the op
        itself computes in float32. For ``banned`` likewise; the op is never reached; and for ``banned_lower_precision``.

    Example:
        >>> input_dtypes(CastPolicy.LOWER_PRECISION_FP, ["float32", "float64", "int64"], "bfloat16")
        ('bfloat16', 'float64', 'int64')
    """
    target: str | None = None
    if policy is CastPolicy.LOWER_PRECISION_FP:
        target = low_dtype
    elif policy is CastPolicy.FP32:
        target = "float32"
    elif policy is CastPolicy.PROMOTE:
        target = widest(dtypes, low_dtype)
    if target is None:
        return tuple(dtypes)
    return tuple(target if eligible(dtype) else dtype for dtype in dtypes)
