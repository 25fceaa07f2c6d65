"""The op lists of Apex's O1, typed off its documentation: what `torch/apex-o1.csv` is held to."""

from __future__ import annotations

from types import ModuleType

import torch
from torch.nn import functional as F

HOMES: dict[str, ModuleType | type] = {"F": F, "torch": torch, "Tensor": torch.Tensor}
"""Where the names are to be found."""

_CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"

LISTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("F", "FP16"): tuple(f"{_CONVOLUTIONS} linear".split()),
    ("F", "FP32"): tuple(
        """interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm local_response_norm
        normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div l1_loss
        mse_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss nll_loss
        binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss""".split()
    ),
    ("F", "BANNED"): ("binary_cross_entropy",),
    ("torch", "FP16"): tuple(f"{_CONVOLUTIONS} prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm".split()),
    ("torch", "FP32"): tuple(
        """acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod std
        sum var renorm""".split()
    ),
    ("torch", "CASTS"): tuple("addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne".split()),
    ("torch", "SEQUENCE_CASTS"): ("cat", "stack"),
    ("Tensor", "FP16"): ("__matmul__",),
    ("Tensor", "FP32"): ("__ipow__", "__pow__", "__rpow__", "cpu"),
    ("Tensor", "CASTS"): tuple(
        """__add__ __div__ __eq__ __ge__ __gt__ __iadd__ __idiv__ __imul__ __isub__ __itruediv__ __le__ __lt__ __mul__ __ne__
        __radd__ __rdiv__ __rmul__ __rsub__ __rtruediv__ __sub__ __truediv__""".split()
    ),
    ("RNN", "FP16"): tuple(
        "rnn_relu rnn_tanh gru lstm rnn_relu_cell rnn_tanh_cell gru_cell lstm_cell".split(),
    ),
}
"""By home and list, the names. The Tensor lists have every name of the torch lists that is a method, too."""

POLICIES = {
    "FP16": ("lower_precision_fp",),
    "FP32": ("fp32", "fp32_set_opt_dtype", "fp32_append_dtype"),
    "CASTS": ("promote",),
    "SEQUENCE_CASTS": ("promote",),
    "BANNED": ("banned_lower_precision",),
}
"""What a list is in mezzo's words. The three for FP32 have one and the same result."""

IN_PLACE = ("__iadd__", "__idiv__", "__imul__", "__isub__", "__itruediv__")

NO_ROW = {
    **dict.fromkeys(
        (f"Tensor.{name}" for name in IN_PLACE),
        "Apex casts the other argument to the dtype of the tensor itself, and PyTorch writes into that dtype anyway",
    ),
    "Tensor.__ipow__": "x **= 2 made a new float32 tensor of a low one; pow_ writes into the tensor, which keeps its dtype",
    "Tensor.cpu": "it made float32 of a low tensor on the way to the CPU; to the dispatcher it is the same op as any .to()",
}
"""Names that no rule of an op can stand for, and why. Nothing else may be missing."""


def methods(kind: str) -> tuple[str, ...]:
    """Name the Tensor methods that are on a list: those of the torch list that exist, and the Tensor's own.

    Args:
        kind: ``"FP16"``, ``"FP32"``, ``"CASTS"`` or ``"SEQUENCE_CASTS"``.

    Returns:
        Method names.
    """
    shared = (name for name in LISTS["torch", kind] if hasattr(torch.Tensor, name))
    own = (name for name in LISTS.get(("Tensor", kind), ()) if hasattr(torch.Tensor, name))
    return (*shared, *own)
