"""A call of every name on the op lists of Apex's O1, written once for every device and dtype, on real or fake tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .o1_lists import HOMES, LISTS, methods


class Make:
    """Makes the tensors of a call; the same call has the same values in every dtype.

    The values have 7 significant bits and lie between 0.25 and 1, so float16, bfloat16 and float32 hold them exactly, and
    every function on the lists is defined there.

    Args:
        dtype: Their dtype.
        device: Where.
        zero_dim: Whether every tensor is a single number without dimensions, whatever shape is asked for.
        fill: Whether there are values; False for fake tensors.
        seed: Other tensors for another seed.
    """

    def __init__(
        self, dtype: torch.dtype, device: str = "cpu", *, zero_dim: bool = False, fill: bool = True, seed: int = 0
    ) -> None:
        self.dtype, self.device, self.zero_dim, self.fill = dtype, device, zero_dim, fill
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        """Make a tensor."""
        shape = () if self.zero_dim else shape
        if not self.fill:
            return torch.empty(shape, device=self.device, dtype=self.dtype)
        whole = torch.randint(32, 128, shape, generator=self.generator)
        return (whole / 128).to(self.dtype)

    def labels(self, *shape: int, of: int) -> Tensor:
        """Make class labels."""
        if not self.fill:
            return torch.empty(shape, device=self.device, dtype=torch.int64)
        return torch.randint(0, of, shape, generator=self.generator)

    def lengths(self, *values: int) -> Tensor:
        """Make a tensor of whole numbers."""
        if not self.fill:
            return torch.empty(len(values), device=self.device, dtype=torch.int64)
        return torch.tensor(values)


Arguments = Callable[[Make, Make], tuple[Any, ...]]
"""Makes the arguments: the first tensor by the first maker, all others by the second."""

PAIR: Arguments = lambda a, b: (a(4, 4), b(4, 4))  # noqa: E731 - one of many
ONE: Arguments = lambda a, _: (a(4, 4),)  # noqa: E731

_SHARED: dict[str, Arguments] = {
    "conv1d": lambda a, b: (a(1, 3, 8), b(4, 3, 3), b(4)),
    "conv2d": lambda a, b: (a(1, 3, 8, 8), b(4, 3, 3, 3), b(4)),
    "conv3d": lambda a, b: (a(1, 3, 4, 4, 4), b(4, 3, 3, 3, 3), b(4)),
    "conv_transpose1d": lambda a, b: (a(1, 3, 8), b(3, 4, 3), b(4)),
    "conv_transpose2d": lambda a, b: (a(1, 3, 8, 8), b(3, 4, 3, 3), b(4)),
    "conv_transpose3d": lambda a, b: (a(1, 3, 4, 4, 4), b(3, 4, 3, 3, 3), b(4)),
    "conv_tbc": lambda a, b: (a(5, 2, 3), b(3, 3, 4), b(4)),
}

_FUNCTIONAL: dict[str, Arguments] = {
    **_SHARED,
    "linear": lambda a, b: (a(4, 4), b(4, 4), b(4)),
    "interpolate": lambda a, _: (a(1, 2, 4, 4), None, 2.0),
    "grid_sample": lambda a, b: (a(1, 1, 4, 4), b(1, 4, 4, 2), "bilinear", "zeros", False),
    "softplus": ONE,
    "softmin": lambda a, _: (a(4, 4), -1),
    "log_softmax": lambda a, _: (a(4, 4), -1),
    "softmax": lambda a, _: (a(4, 4), -1),
    "gelu": ONE,
    "layer_norm": lambda a, b: (a(4, 4), (4,), b(4), b(4)),
    "group_norm": lambda a, b: (a(2, 4, 3), 2, b(4), b(4)),
    "local_response_norm": lambda a, _: (a(2, 4, 4), 2),
    "normalize": lambda a, _: (a(4, 4),),
    "cosine_similarity": PAIR,
    "poisson_nll_loss": PAIR,
    "cosine_embedding_loss": lambda a, b: (a(4, 4), b(4, 4), a.lengths(1, -1, 1, -1)),
    "cross_entropy": lambda a, b: (a(4, 4), a.labels(4, of=4), b(4)),
    "hinge_embedding_loss": PAIR,
    "kl_div": lambda a, b: (a(4, 4), b(4, 4), None, None, "sum"),
    "l1_loss": PAIR,
    "mse_loss": PAIR,
    "margin_ranking_loss": lambda a, b: (a(4), b(4), b(4)),
    "multilabel_margin_loss": lambda a, _: (a(4, 4), a.labels(4, 4, of=4)),
    "multilabel_soft_margin_loss": PAIR,
    "multi_margin_loss": lambda a, _: (a(4, 4), a.labels(4, of=4)),
    "nll_loss": lambda a, b: (a(4, 4), a.labels(4, of=4), b(4)),
    "binary_cross_entropy_with_logits": PAIR,
    "smooth_l1_loss": PAIR,
    "soft_margin_loss": PAIR,
    "triplet_margin_loss": lambda a, b: (a(4, 4), b(4, 4), b(4, 4)),
    "ctc_loss": lambda a, _: (a(6, 2, 4), a.labels(2, 3, of=3) + 1, a.lengths(6, 6), a.lengths(3, 3)),
    "binary_cross_entropy": PAIR,
}

TORCH: dict[str, Arguments] = {
    **_SHARED,
    "prelu": lambda a, b: (a(4, 4), b(1)),
    "addmm": lambda a, b: (a(4, 4), b(4, 4), b(4, 4)),
    "addmv": lambda a, b: (a(4), b(4, 4), b(4)),
    "addr": lambda a, b: (a(4, 4), b(4), b(4)),
    "matmul": PAIR,
    "mm": PAIR,
    "mv": lambda a, b: (a(4, 4), b(4)),
    "addbmm": lambda a, b: (a(4, 4), b(2, 4, 4), b(2, 4, 4)),
    "baddbmm": lambda a, b: (a(2, 4, 4), b(2, 4, 4), b(2, 4, 4)),
    "bmm": lambda a, b: (a(2, 4, 4), b(2, 4, 4)),
    **dict.fromkeys("acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan".split(), ONE),
    "pow": PAIR,
    "cumprod": lambda a, _: (a(4, 4), 0),
    "cumsum": lambda a, _: (a(4, 4), 0),
    "dist": PAIR,
    **dict.fromkeys("norm prod std sum var".split(), ONE),
    "renorm": lambda a, _: (a(4, 4), 2, 0, 0.5),
    "addcdiv": lambda a, b: (a(4, 4), b(4, 4), b(4, 4)),
    "addcmul": lambda a, b: (a(4, 4), b(4, 4), b(4, 4)),
    "cross": lambda a, b: (a(4, 3), b(4, 3), 1),
    "bilinear": lambda a, b: (a(4, 4), b(4, 4), b(2, 4, 4), b(2)),
    "dot": lambda a, b: (a(4), b(4)),
    **dict.fromkeys("atan2 add div mul eq equal ge gt le lt ne".split(), PAIR),
    "cat": lambda a, b: ([a(4, 4), b(4, 4)],),
    "stack": lambda a, b: ([a(4, 4), b(4, 4)],),
}

"""By the names of torch and Tensor."""

_ARGUMENTS = {
    "F": _FUNCTIONAL,
    "torch": TORCH,
    "Tensor": {
        **TORCH,
        **dict.fromkeys((name for (home, _), names in LISTS.items() if home == "Tensor" for name in names), PAIR),
    },
}

OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "__matmul__": operator.matmul,
    "__pow__": operator.pow,
    **{f"__{name}__": getattr(operator, name) for name in "add sub mul truediv eq ge gt le lt ne".split()},
    "__rpow__": lambda x, _: 2.0**x,
    "__rtruediv__": lambda x, _: 1.0 / x,
    "__rsub__": lambda x, _: 1.0 - x,
    "__radd__": lambda x, _: 1.0 + x,
    "__rmul__": lambda x, _: 2.0 * x,
}
"""The operators behind Tensor's own names; those on the right of a number get one."""


def call(home: str, name: str, first: Make, rest: Make) -> Any:
    """Call a listed name.

    Args:
        home: ``"F"``, ``"torch"``, ``"Tensor"``, or ``"operator"``.
        name: The name there.
        first: Makes the first tensor.
        rest: Makes the others.

    Returns:
        What it returns.
    """
    if home == "operator":
        return OPERATORS[name](first(4, 4), rest(4, 4))
    return getattr(HOMES[home], name)(*_ARGUMENTS[home][name](first, rest))


def forms(*kinds: str) -> list[tuple[str, str]]:
    """List the forms of every name on some lists: functions, methods and operators.

    Args:
        kinds: The lists.

    Returns:
        Pairs of home and name.
    """
    found = [
        (home, name)
        for (home, kind), names in LISTS.items()
        if home in ("F", "torch") and kind in kinds
        for name in names
    ]
    of_tensors = [name for kind in kinds if kind != "BANNED" for name in methods(kind)]
    found += [("Tensor", name) for name in of_tensors]
    return found + [("operator", name) for name in of_tensors if name in OPERATORS]
