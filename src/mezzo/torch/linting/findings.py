"""What a recording shows that its user may not expect: the rules that look for it, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mezzo.report.findings import Finding
from mezzo.torch.recording.recorded import RecordedOp

from .casts import activations_cast_again, redundant_casts, weights_cast_again
from .dtypes import float32_memory, half_inputs, half_models, slow_dtypes
from .far import far_from_float32
from .masks import overflowing_constants
from .mixed import mixed_dtypes
from .numbers import bce_after_sigmoid, float16_losses, lost_constants
from .products import float32_products
from .recording import Recording
from .silent import float32_without_rule, gradients_underflow
from .training import backward_in_region, scaled_gradients_clipped

__all__ = ["KINDS", "findings_of"]

_RULES: tuple[Callable[[Recording], Iterator[Finding]], ...] = (
    # Wrong numbers first, then what costs time and memory.
    overflowing_constants,
    lost_constants,
    far_from_float32,
    gradients_underflow,
    float16_losses,
    bce_after_sigmoid,
    backward_in_region,
    scaled_gradients_clipped,
    half_models,
    half_inputs,
    slow_dtypes,
    float32_products,
    redundant_casts,
    weights_cast_again,
    activations_cast_again,
    float32_memory,
    float32_without_rule,
    mixed_dtypes,
)

KINDS = (
    "mask overflow",
    "constant overflow",
    "eps lost",
    "far from float32",
    "gradients underflow",
    "float16 loss",
    "bce after sigmoid",
    "backward in region",
    "scaled gradients clipped",
    "half model under autocast",
    "half input",
    "slow dtype",
    "float32 products",
    "redundant casts",
    "weight cast again",
    "activation cast again",
    "float32 memory",
    "mixed dtypes",
)
"""The kinds of findings, the gravest first: eleven of wrong numbers, then seven of time and memory."""


def findings_of(ops: Sequence[RecordedOp], *, mastered: frozenset[str] = frozenset()) -> Iterator[Finding]:
    """Look through what was recorded. Pure; it may run in any thread.

    Args:
        ops: The ops in the order of time, of one rank.
        mastered: Names of parameters that have a float32 master, as `mezzo.torch.prepare` gives them: these may be low.

    Yields:
        Findings, the gravest kinds first. Ops that one line calls in like modules, such as all layers of a network, are one
        finding; its ``count`` says how many they were, and ``*`` stands for what differs in the modules' names.

    Example:
        >>> from mezzo.report.records import OpRecord
        >>> record = OpRecord("aten::mul", "not listed", path=("attn",), came=("float16",), used=("float16",),
        ...                   gave=("float16",), shapes_in=((4, 4),), shapes_out=((4, 4),))
        >>> [found] = findings_of([RecordedOp(record, 0, scalars=(-1e9,), autocast="float16")])
        >>> found.kind, found.advice
        ('mask overflow', 'fill with torch.finfo(x.dtype).min, x being what is masked')
    """
    recording = Recording(ops, mastered)
    for rule in _RULES:
        yield from rule(recording)
