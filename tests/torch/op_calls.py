"""Calls of some forty listed ops, written once for every device and dtype, on real or fake tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


class Maker:
    """Makes the inputs of the calls.

    Args:
        device: Where.
        dtype: The dtype of `low`; `full` makes float32.
        fill: Fill with ones; False for fake tensors.
    """

    def __init__(self, device: str, dtype: torch.dtype, *, fill: bool = True) -> None:
        self.device, self.dtype, self.fill = device, dtype, fill

    def __call__(self, *shape: int) -> Tensor:
        """Make a tensor of the dtype asked for."""
        return self._make(shape, self.dtype)

    def full(self, *shape: int) -> Tensor:
        """Make a float32 tensor."""
        return self._make(shape, torch.float32)

    def index(self, *shape: int) -> Tensor:
        """Make an index tensor."""
        return self._make(shape, torch.int64)

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        empty = torch.empty(shape, device=self.device, dtype=dtype)
        if not self.fill:
            return empty
        return empty.zero_() if dtype is torch.int64 else empty.fill_(0.5)


Call = Callable[[Maker], Tensor]

CALLS: dict[str, Call] = {
    "matmul": lambda t: t(4, 4) @ t(4, 4),
    "mm": lambda t: torch.mm(t(4, 4), t(4, 4)),
    "bmm": lambda t: torch.bmm(t(2, 4, 4), t(2, 4, 4)),
    "addmm": lambda t: torch.addmm(t(4, 4), t(4, 4), t(4, 4)),
    "baddbmm": lambda t: torch.baddbmm(t(2, 4, 4), t(2, 4, 4), t(2, 4, 4)),
    "mv": lambda t: torch.mv(t(4, 4), t(4)),
    "einsum": lambda t: torch.einsum("ij,jk->ik", t(4, 4), t(4, 4)),
    "multi_dot": lambda t: torch.linalg.multi_dot([t(4, 4), t(4, 4), t(4, 4)]),
    "linear": lambda t: F.linear(t(4, 4), t(4, 4), t(4)),
    "conv1d": lambda t: F.conv1d(t(1, 3, 8), t(4, 3, 3)),
    "conv2d": lambda t: F.conv2d(t(1, 3, 8, 8), t(4, 3, 3, 3)),
    "conv_transpose2d": lambda t: F.conv_transpose2d(t(1, 3, 8, 8), t(3, 4, 3, 3)),
    "prelu": lambda t: F.prelu(t(4, 4), t(1)),
    "attention": lambda t: F.scaled_dot_product_attention(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)),
    "lstm_cell": lambda t: torch.lstm_cell(t(2, 4), [t(2, 4)] * 2, t(16, 4), t(16, 4), t(16), t(16))[0],
    "rnn_tanh_cell": lambda t: torch.rnn_tanh_cell(t(2, 4), t(2, 4), t(4, 4), t(4, 4), t(4), t(4)),
    "pow": lambda t: t(4, 4) ** 2,
    "rpow": lambda t: 2 ** t(4, 4),
    "reciprocal": lambda t: 1 / t(4, 4),
    "rsqrt": lambda t: t(4, 4).rsqrt(),
    "exp": lambda t: t(4, 4).exp(),
    "log": lambda t: t(4, 4).log(),
    "softplus": lambda t: F.softplus(t(4, 4)),
    "softmax": lambda t: t(4, 4).softmax(-1),
    "log_softmax": lambda t: F.log_softmax(t(4, 4), -1),
    "softmin": lambda t: F.softmin(t(4, 4), -1),
    "layer_norm": lambda t: F.layer_norm(t(4, 4), (4,)),
    "group_norm": lambda t: F.group_norm(t(2, 4, 3), 2),
    "rms_norm": lambda t: F.rms_norm(t(4, 4), (4,)),
    "norm": lambda t: t(4, 4).norm(),
    "norm.Scalar": lambda t: torch.ops.aten.norm.Scalar(t(4, 4)),
    "sum": lambda t: t(4, 4).sum(),
    "sum.dtype": lambda t: t(4, 4).sum(dtype=torch.float16),
    "prod": lambda t: t(4, 4).prod(0),
    "cumsum": lambda t: t(4, 4).cumsum(0),
    "cosine_similarity": lambda t: F.cosine_similarity(t(4, 4), t(4, 4)),
    "cdist": lambda t: torch.cdist(t(4, 4), t(4, 4)),
    "mse_loss": lambda t: F.mse_loss(t(4, 4), t(4, 4)),
    "l1_loss": lambda t: F.l1_loss(t(4, 4), t(4, 4)),
    "nll_loss": lambda t: F.nll_loss(t(4, 4), t.index(4)),
    "cross_entropy": lambda t: F.cross_entropy(t(4, 4), t.index(4)),
    "interpolate": lambda t: F.interpolate(t(1, 1, 4, 4), scale_factor=2, mode="bilinear"),
    "addcmul": lambda t: torch.addcmul(t(4, 4), t.full(4, 4), t(4, 4)),
    "addcdiv": lambda t: torch.addcdiv(t(4, 4), t(4, 4), t.full(4, 4)),
    "bilinear": lambda t: F.bilinear(t(4, 4), t(4, 4), t.full(2, 4, 4), None),
    "cat": lambda t: torch.cat([t.full(4, 4), t(4, 4)]),
    "stack": lambda t: torch.stack([t(4, 4), t(4, 4)]),
    "dot": lambda t: torch.dot(t(4), t.full(4)),
    "index_put": lambda t: t.full(4, 4).index_put([t.index(2)], t(4)),
    "gelu": lambda t: F.gelu(t(4, 4)),
    "tanh": lambda t: t(4, 4).tanh(),
    "mean": lambda t: t(4, 4).mean(),
}
"""Name to call. The last three are on no list."""

NOT_ON_FAKE_TENSORS: dict[str, Call] = {
    "gru_cell": lambda t: torch.gru_cell(t(2, 4), t(2, 4), t(12, 4), t(12, 4), t(12), t(12)),
    "grid_sample": lambda t: F.grid_sample(t(1, 1, 4, 4), t.full(1, 4, 4, 2), align_corners=False),
}
"""Calls that need a device: they ask its library how to run."""
