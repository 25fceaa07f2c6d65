"""One call or more of every op on the accelerators' reference list, with its inputs described and not yet made.

An op is called by its overload, so that each row of the table is met by the kernel of that row and of no other. The
inputs are made by `Call.inputs` in the dtypes of a pairing: all float32, all in the region's dtype, both mixed, all in the
other lower-precision dtype, float64, or integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

LOW, OTHER = "the region's dtype", "the other lower-precision dtype"

PAIRINGS: dict[str, tuple[Any, ...]] = {
    "float32": (torch.float32,),
    "low": (LOW,),
    "mixed": (torch.float32, LOW),
    "mixed, low first": (LOW, torch.float32),
    "other": (OTHER,),
    "float64": (torch.float64,),
    "integers": (torch.int64,),
}
"""Name to the dtypes that the floating inputs have, in turn."""


@dataclass(frozen=True)
class Input:
    """A tensor that is yet to be made.

    Attributes:
        shape: Its shape.
        low: The least value of its entries.
        high: The greatest.
        signs: Only the two, and nothing between.
        constant: PyTorch has no gradient for it.
    """

    shape: tuple[int, ...]
    low: float = -0.9
    high: float = 0.9
    signs: bool = False
    constant: bool = False

    def make(self, dtype: torch.dtype, numbers: torch.Generator) -> Tensor:
        """Make the tensor; integers lie between 1 and 3."""
        if not dtype.is_floating_point:
            return torch.randint(1, 4, self.shape, generator=numbers, dtype=dtype)
        share = torch.rand(self.shape, generator=numbers)
        share = share.round() if self.signs else share
        return (self.low + share * (self.high - self.low)).to(dtype)


@dataclass(frozen=True)
class Call:
    """A call of an op.

    Attributes:
        op: The op, as the table spells it.
        args: Its arguments; an `Input` stands for a tensor to be made, a tensor for itself.
        kwargs: Its keyword arguments.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def overload(self) -> Callable[..., Any]:
        """The overload, looked up in this PyTorch."""
        return overload(self.op)

    @property
    def number_of_inputs(self) -> int:
        """How many tensors have the dtype of a pairing."""
        return sum(isinstance(leaf, Input) for leaf in tree_leaves(self.args))

    def inputs(self, pairing: str, low: torch.dtype, *, device: str = "cpu", leaves: bool = False) -> tuple[Any, ...]:
        """Make the arguments; the same ones at every call.

        Args:
            pairing: One of `PAIRINGS`.
            low: The region's dtype.
            device: Where they are to be.
            leaves: Whether they want gradients.
        """
        numbers = torch.Generator().manual_seed(0)
        other = torch.bfloat16 if low is torch.float16 else torch.float16
        dtypes = cycle({LOW: low, OTHER: other}.get(dtype, dtype) for dtype in PAIRINGS[pairing])

        def make(described: Input) -> Tensor:
            made = described.make(next(dtypes), numbers).to(device)
            return made.requires_grad_(leaves and not described.constant)

        args = tree_map_only(Tensor, lambda tensor: tensor.to(device), self.args)
        return tree_map_only(Input, make, args)  # type: ignore[no-any-return]


def overload(op: str) -> Callable[..., Any]:
    """Find an op of this PyTorch.

    Raises:
        AttributeError: It has none of that name.
    """
    base, _, name = op.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), name or "default")  # type: ignore[no-any-return]


def x(*shape: int) -> Input:
    return Input(shape)


def positive(*shape: int, constant: bool = False) -> Input:
    return Input(shape, low=0.1, constant=constant)


def signs(*shape: int) -> Input:
    return Input(shape, low=-1.0, high=1.0, signs=True, constant=True)


def indices(*values: int, shape: tuple[int, ...] = (-1,)) -> Tensor:
    return torch.tensor(values).reshape(shape)


def call(op: str, *args: Any, **kwargs: Any) -> Call:
    return Call(f"aten::{op}", args, kwargs)


def cell(op: str, gates: int, hidden: Any) -> Call:
    return call(op, x(2, 5), hidden, x(gates * 4, 5), x(gates * 4, 4), x(gates * 4), x(gates * 4))


def one_each(*ops: str, of: Callable[..., Input] = x) -> list[Call]:
    return [call(op, of(3, 4)) for op in ops]


MEAN = 1
"""The number of the reduction in the schemas of losses."""

PRODUCTS = [
    call("mm", x(3, 4), x(4, 5)),
    call("bmm", x(2, 3, 4), x(2, 4, 5)),
    call("mv", x(3, 4), x(4)),
    call("addmm", x(3, 5), x(3, 4), x(4, 5), beta=0.5, alpha=2),
    call("addmv", x(3), x(3, 4), x(4)),
    call("addr", x(3, 4), x(3), x(4)),
    call("addbmm", x(3, 5), x(2, 3, 4), x(2, 4, 5)),
    call("baddbmm", x(2, 3, 5), x(2, 3, 4), x(2, 4, 5)),
    call("matmul", x(3, 4), x(4, 5)),
    call("matmul", x(2, 3, 4), x(4)),
    call("linear", x(3, 4), x(5, 4), x(5)),
    call("linear", x(3, 4), x(5, 4)),
    call("einsum", "ij,kj->ik", [x(3, 4), x(5, 4)]),
    call("einsum", "ij->ji", [x(3, 4)]),
    call("chain_matmul", [x(3, 4), x(4, 5), x(5, 2)]),
    call("linalg_multi_dot", [x(3, 4), x(4, 5), x(5, 2)]),
    call("linalg_vecdot", x(3, 4), x(3, 4)),
    call("prelu", x(3, 4), x(1)),
    call("scaled_dot_product_attention", x(1, 2, 3, 8), x(1, 2, 4, 8), x(1, 2, 4, 8)),
    call("scaled_dot_product_attention", x(1, 2, 3, 8), x(1, 2, 4, 8), x(1, 2, 4, 8), x(3, 4)),
    call("_scaled_dot_product_flash_attention", x(1, 2, 3, 8), x(1, 2, 4, 8), x(1, 2, 4, 8)),
    cell("rnn_tanh_cell", 1, x(2, 4)),
    cell("rnn_relu_cell", 1, x(2, 4)),
    cell("gru_cell", 3, x(2, 4)),
    cell("lstm_cell", 4, [x(2, 4), x(2, 4)]),
    call("_thnn_fused_gru_cell", x(2, 12), x(2, 12), x(2, 4), x(12), x(12)),
    call("_thnn_fused_lstm_cell", x(2, 16), x(2, 16), x(2, 4), x(16), x(16)),
]

CONVOLUTIONS = [
    call("conv1d", x(2, 3, 6), x(4, 3, 3), x(4)),
    call("conv2d", x(2, 3, 6, 6), x(4, 3, 3, 3), x(4)),
    call("conv2d", x(2, 3, 6, 6), x(4, 3, 3, 3)),
    call("conv3d", x(1, 2, 4, 4, 4), x(3, 2, 3, 3, 3), x(3)),
    call("conv_transpose1d", x(2, 3, 6), x(3, 4, 3), x(4)),
    call("conv_transpose2d.input", x(2, 3, 5, 5), x(3, 4, 3, 3), x(4)),
    call("conv_transpose3d.input", x(1, 2, 3, 3, 3), x(2, 3, 3, 3, 3), x(3)),
    call("conv_tbc", x(6, 2, 3), x(3, 3, 4), x(4)),
    call("convolution", x(2, 3, 6), x(4, 3, 3), x(4), [1], [0], [1], False, [0], 1),
    call("_convolution", x(2, 3, 6), x(4, 3, 3), x(4), [1], [0], [1], False, [0], 1, False, False, True, True),
    call("_convolution.deprecated", x(2, 3, 6), x(4, 3, 3), x(4), [1], [0], [1], False, [0], 1, False, False, True),
]

POINTWISE = [
    *one_each("acos", "asin", "cosh", "erfinv", "exp", "expm1", "sinh", "softplus", "tan"),
    *one_each("log", "log10", "log1p", "log2", "reciprocal", "rsqrt", of=positive),
    call("pow.Scalar", 2.5, x(3, 4)),
    call("pow.Tensor_Scalar", x(3, 4), 3),
    call("pow.Tensor_Tensor", positive(3, 4), x(3, 4)),
    call("renorm", x(3, 4), 2, 0, 0.5),
]

NORMALISATION = [
    call("group_norm", x(2, 4, 3), 2, x(4), x(4)),
    call("layer_norm", x(3, 4), [4], x(4), x(4)),
    call("layer_norm", x(3, 4), [4]),
    call("native_layer_norm", x(3, 4), [4], x(4), x(4), 1e-5),
    call("rms_norm", x(3, 4), [4], x(4)),
    call("logsumexp", x(3, 4), [1]),
    call("frobenius_norm.dim", x(3, 4), [1]),
    call("nuclear_norm", x(3, 4)),
    call("nuclear_norm.dim", x(2, 3, 4), [1, 2]),
    call("cosine_similarity", x(3, 4), x(3, 4)),
    call("cdist", x(3, 4), x(5, 4)),
    call("pdist", x(4, 3)),
    call("dist", x(3, 4), x(3, 4)),
]

LOSSES = [
    call(
        "binary_cross_entropy_with_logits",
        x(3, 4),
        positive(3, 4),
        positive(4, constant=True),
        positive(4, constant=True),
        MEAN,
    ),
    call("cosine_embedding_loss", x(3, 4), x(3, 4), signs(3)),
    call("hinge_embedding_loss", x(3, 4), signs(3, 4)),
    call("huber_loss", x(3, 4), x(3, 4)),
    call("kl_div", x(3, 4), positive(3, 4)),
    call("l1_loss", x(3, 4), x(3, 4)),
    call("margin_ranking_loss", x(4), x(4), signs(4)),
    call("mse_loss", x(3, 4), x(3, 4)),
    call("multi_margin_loss", x(3, 4), indices(0, 3, 1)),
    call("multilabel_margin_loss", x(2, 3), indices(0, 1, -1, 2, -1, 0, shape=(2, 3))),
    call("nll_loss", x(3, 4), indices(0, 3, 1), positive(4, constant=True)),
    call("nll_loss2d", x(2, 3, 2, 2), indices(0, 1, 2, 0, 1, 2, 0, 1, shape=(2, 2, 2))),
    call("poisson_nll_loss", x(3, 4), positive(3, 4), True, False, 1e-8, MEAN),
    call("smooth_l1_loss", x(3, 4), x(3, 4)),
    call("soft_margin_loss", x(3, 4), signs(3, 4)),
    call("triplet_margin_loss", x(3, 4), x(3, 4), x(3, 4)),
]

RESAMPLING = [
    call("_upsample_bicubic2d_aa", x(1, 2, 4, 4), [3, 3], False),
    call("_upsample_bilinear2d_aa", x(1, 2, 4, 4), [3, 3], False),
    call("_upsample_nearest_exact1d", x(1, 2, 4), [6]),
    call("_upsample_nearest_exact2d", x(1, 2, 4, 4), [6, 6]),
    call("_upsample_nearest_exact3d", x(1, 2, 3, 3, 3), [5, 5, 5]),
    call("upsample_bicubic2d", x(1, 2, 4, 4), [6, 6], False),
    call("upsample_bilinear2d", x(1, 2, 4, 4), [6, 6], False),
    call("upsample_linear1d", x(1, 2, 4), [6], False),
    call("upsample_nearest1d", x(1, 2, 4), [6]),
    call("upsample_nearest2d", x(1, 2, 4, 4), [6, 6]),
    call("upsample_nearest3d", x(1, 2, 3, 3, 3), [5, 5, 5]),
    call("upsample_trilinear3d", x(1, 2, 3, 3, 3), [5, 5, 5], False),
]

WITH_A_DTYPE = [
    call("sum", x(3, 4)),
    call("sum.dim_IntList", x(3, 4), [0], True),
    call("prod", positive(3, 4)),
    call("prod.dim_int", positive(3, 4), 0),
    call("cumsum", x(3, 4), 0),
    call("cumprod", positive(3, 4), 0),
    call("softmax.int", x(3, 4), -1),
    call("log_softmax.int", x(3, 4), -1),
    call("linalg_vector_norm", x(3, 4)),
    call("linalg_vector_norm", x(3, 4), 1, [0]),
    call("linalg_matrix_norm", x(3, 4), 1),
    call("linalg_matrix_norm.str_ord", x(3, 4), "fro"),
    call("norm.Scalar", x(3, 4)),
    call("norm.Scalar", x(3, 4), 3),
    call("norm.ScalarOpt_dim", x(3, 4), 2, [0], True),
]

PROMOTING = [
    call("addcdiv", x(3, 4), x(3, 4), positive(3, 4), value=0.5),
    call("addcmul", x(3, 4), x(3, 4), x(3, 4), value=0.5),
    call("atan2", x(3, 4), positive(3, 4)),
    call("bilinear", x(3, 4), x(3, 5), x(2, 4, 5)),
    call("bilinear", x(3, 4), x(3, 5), x(2, 4, 5), x(2)),
    call("cross", x(3, 4), x(3, 4), 0),
    call("dot", x(4), x(4)),
    call("vdot", x(4), x(4)),
    call("grid_sampler", x(1, 2, 4, 4), x(1, 3, 3, 2), 0, 0, False),
    call("index_put", x(3, 4), [indices(0, 2)], x(2, 4)),
    call("index_put", x(3, 4), [None, indices(0, 2)], x(3, 2), True),
    call("scatter_add", x(3, 4), 0, indices(0, 1, 2, 0, shape=(1, 4)), x(1, 4)),
    call("tensordot", x(3, 4), x(4, 5), [1], [0]),
]

BANNED = [
    call("binary_cross_entropy", positive(3, 4), positive(3, 4)),
    call("binary_cross_entropy", positive(3, 4), positive(3, 4), positive(4), MEAN),
]

CALLS = [
    *PRODUCTS,
    *CONVOLUTIONS,
    *POINTWISE,
    *NORMALISATION,
    *LOSSES,
    *RESAMPLING,
    *WITH_A_DTYPE,
    *PROMOTING,
]
"""Every call that runs; those of banned ops are in `BANNED`."""
