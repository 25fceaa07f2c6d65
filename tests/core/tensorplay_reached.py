"""Which ops a function, method or module of TensorPlay reaches: run as a program, it prints them as JSON.

Every op is wrapped where mezzo wraps it, at `tensorplay._C` and `tensorplay.Tensor`, by something that notes its name. A
call that TensorPlay's own Python makes inside another one is noted, too; what C++ calls inside an op is not.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import tensorplay as tp
from tensorplay.nn import functional as F

from mezzo.vocabulary import vocabulary

_REACHED: list[str] = []
_DUNDERS = (
    "matmul",
    "rmatmul",
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "pow",
    "rpow",
    "neg",
)


def _note(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        _REACHED.append(name)
        return call(*args, **kwargs)

    return noted


def _wrap() -> None:
    held = {id(value): op for op, value in vars(tp._C).items() if op in vocabulary("tensorplay").traits}
    for module in [module for name, module in sys.modules.items() if name.startswith("tensorplay") and module]:
        for attribute, value in list(vars(module).items()):
            if id(value) in held:
                setattr(module, attribute, _note(held[id(value)], value))
    for op in vocabulary("tensorplay").traits:
        if callable(getattr(tp.Tensor, op, None)):
            setattr(tp.Tensor, op, _note(op, getattr(tp.Tensor, op)))
    for word in _DUNDERS:
        if hasattr(tp.Tensor, f"__{word}__"):
            name = f"__{word}__"
            setattr(tp.Tensor, name, _note(name, getattr(tp.Tensor, name)))


def _calls() -> dict[str, Callable[[], Any]]:
    """One call for each name, with inputs that it takes."""
    x, w, v = tp.rand(4, 4), tp.rand(4, 4), tp.rand(4)
    target, image, volume = tp.tensor([0, 1, 2, 3]), tp.rand(1, 2, 6, 6), tp.rand(1, 2, 4, 4, 4)
    signal = tp.rand(1, 2, 6)
    signs, one_sign, positive = tp.ones(4, 4), tp.ones(4), tp.rand(4, 4) + 1
    frames, labels, classes = tp.rand(5, 2, 4).log_softmax(2), tp.ones(2, 2).to(tp.int64), tp.ones(4, 4).to(tp.int64)
    sequence, cell = tp.rand(3, 2, 4), tp.rand(2, 4)
    return {
        "F.cross_entropy": lambda: F.cross_entropy(x, target),
        "F.nll_loss": lambda: F.nll_loss(x, target),
        "F.kl_div": lambda: F.kl_div(x, w, reduction="batchmean"),
        "F.l1_loss": lambda: F.l1_loss(x, w),
        "F.mse_loss": lambda: F.mse_loss(x, w),
        "F.smooth_l1_loss": lambda: F.smooth_l1_loss(x, w),
        "F.huber_loss": lambda: F.huber_loss(x, w),
        "F.binary_cross_entropy": lambda: F.binary_cross_entropy(x, w),
        "F.binary_cross_entropy_with_logits": lambda: F.binary_cross_entropy_with_logits(x, w),
        "F.poisson_nll_loss": lambda: F.poisson_nll_loss(x, w),
        "F.gaussian_nll_loss": lambda: F.gaussian_nll_loss(x, w, positive),
        "F.soft_margin_loss": lambda: F.soft_margin_loss(x, signs),
        "F.hinge_embedding_loss": lambda: F.hinge_embedding_loss(x, signs),
        "F.margin_ranking_loss": lambda: F.margin_ranking_loss(v, v, one_sign),
        "F.cosine_embedding_loss": lambda: F.cosine_embedding_loss(x, w, one_sign),
        "F.triplet_margin_loss": lambda: F.triplet_margin_loss(x, w, positive),
        "F.multilabel_soft_margin_loss": lambda: F.multilabel_soft_margin_loss(x, signs),
        "F.ctc_loss": lambda: F.ctc_loss(frames, labels, [5, 5], [2, 2]),
        "F.softmin": lambda: F.softmin(x, 1),
        "F.gumbel_softmax": lambda: F.gumbel_softmax(x, dim=1),
        "F.logsigmoid": lambda: F.logsigmoid(x),
        "F.softsign": lambda: F.softsign(x),
        "F.tanhshrink": lambda: F.tanhshrink(x),
        "F.normalize": lambda: F.normalize(x),
        "F.pairwise_distance": lambda: F.pairwise_distance(x, w),
        "F.cosine_similarity": lambda: F.cosine_similarity(x, w),
        "F.pdist": lambda: F.pdist(x),
        "F.bilinear": lambda: F.bilinear(x, w, tp.rand(3, 4, 4)),
        "F.linear": lambda: F.linear(x, w),
        "F.embedding": lambda: F.embedding(target, w),
        "F.embedding_bag": lambda: F.embedding_bag(target, w, tp.tensor([0, 2])),
        "F.rms_norm": lambda: F.rms_norm(x, [4]),
        "F.layer_norm": lambda: F.layer_norm(x, [4]),
        "F.group_norm": lambda: F.group_norm(image, 2),
        "F.batch_norm": lambda: F.batch_norm(image, tp.zeros(2), tp.ones(2), training=True),
        "F.instance_norm": lambda: F.instance_norm(image),
        "F.local_response_norm": lambda: F.local_response_norm(image, 2),
        "F.grid_sample": lambda: F.grid_sample(image, tp.zeros(1, 3, 3, 2), align_corners=False),
        "F.affine_grid": lambda: F.affine_grid(tp.rand(1, 2, 3), [1, 2, 6, 6], align_corners=False),
        "F.interpolate": lambda: [
            F.interpolate(image, scale_factor=2.0, mode=mode) for mode in ("nearest", "bilinear", "bicubic")
        ],
        "F.adaptive_avg_pool1d": lambda: F.adaptive_avg_pool1d(signal, 3),
        "F.adaptive_max_pool1d": lambda: F.adaptive_max_pool1d(signal, 3),
        "F.adaptive_max_pool2d": lambda: F.adaptive_max_pool2d(image, 3),
        "F.avg_pool1d": lambda: F.avg_pool1d(signal, 2),
        "F.max_pool1d": lambda: F.max_pool1d(signal, 2),
        "F.max_pool2d": lambda: F.max_pool2d(image, 2),
        "F.max_pool3d": lambda: F.max_pool3d(volume, 2),
        "F.lp_pool2d": lambda: F.lp_pool2d(image, 2.0, 2),
        "F.unfold": lambda: F.unfold(image, 2),
        "F.lp_pool1d": lambda: F.lp_pool1d(signal, 2.0, 2),
        "F.max_unpool1d": lambda: F.max_unpool1d(*F.max_pool1d(signal, 2, return_indices=True), 2),
        "F.fractional_max_pool2d": lambda: F.fractional_max_pool2d(image, 2, output_size=3),
        "F.rrelu": lambda: F.rrelu(x, training=True),
        "F.feature_alpha_dropout": lambda: F.feature_alpha_dropout(image, 0.5, training=True),
        "F.dropout2d": lambda: F.dropout2d(image, 0.5, training=True),
        "F.fold": lambda: F.fold(tp.rand(1, 8, 25), (6, 6), 2),
        "F.pad": lambda: [F.pad(image, (1, 1), mode=mode) for mode in ("constant", "circular")],
        "F.conv1d": lambda: F.conv1d(signal, tp.rand(3, 2, 2)),
        "F.conv2d": lambda: F.conv2d(image, tp.rand(3, 2, 2, 2)),
        "F.conv3d": lambda: F.conv3d(volume, tp.rand(3, 2, 2, 2, 2)),
        "F.conv_transpose2d": lambda: F.conv_transpose2d(image, tp.rand(2, 3, 2, 2)),
        "F.conv_tbc": lambda: F.conv_tbc(tp.rand(6, 1, 2), tp.rand(2, 2, 3), tp.rand(3)),
        "F.dropout": lambda: F.dropout(x, 0.5, training=True),
        "F.alpha_dropout": lambda: F.alpha_dropout(x, 0.5, training=True),
        "F.scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(sequence, sequence, sequence),
        "F.multi_head_attention_forward": lambda: tp.nn.MultiheadAttention(4, 2)(sequence, sequence, sequence),
        "tensorplay.matrix_power": lambda: tp.matrix_power(x, 3),
        "tensorplay.chain_matmul": lambda: tp.chain_matmul(x, w, x),
        "tensorplay.tensordot": lambda: tp.tensordot(x, w, 1),
        "tensorplay.einsum": lambda: tp.einsum("ij,jk->ik", x, w),
        "tensorplay.kron": lambda: tp.kron(x, w),
        "tensorplay.block_diag": lambda: tp.block_diag(x, w),
        "tensorplay.cdist": lambda: tp.cdist(x, w),
        "tensorplay.norm": lambda: tp.norm(x),
        "tensorplay.cov": lambda: tp.cov(x),
        "tensorplay.quantile": lambda: tp.quantile(x, 0.5),
        "tensorplay.logsumexp": lambda: tp.logsumexp(x, 1),
        "tensorplay.trapezoid": lambda: tp.trapezoid(x),
        "tensorplay.concat": lambda: tp.concat([x, w]),
        "tensorplay.hstack": lambda: tp.hstack([x, w]),
        "tensorplay.vstack": lambda: tp.vstack([x, w]),
        "tensorplay.lstm_cell": lambda: tp.lstm_cell(cell, cell, cell, tp.rand(16, 4), tp.rand(16, 4)),
        "Tensor.norm": lambda: x.norm(2),
        "Tensor.softmax": lambda: x.softmax(1),
        "__matmul__": lambda: x @ w,
        "__add__": lambda: x + w,
        "__rsub__": lambda: 1.0 - x,
        "__pow__": lambda: x**2,
        "__rpow__": lambda: 2.0**x,
        "__truediv__": lambda: x / w,
        "__rtruediv__": lambda: 1.0 / x,
        "nn.Linear": lambda: tp.nn.Linear(4, 4)(x),
        "nn.Bilinear": lambda: tp.nn.Bilinear(4, 4, 3)(x, w),
        "nn.LayerNorm": lambda: tp.nn.LayerNorm(4)(x),
        "nn.GroupNorm": lambda: tp.nn.GroupNorm(2, 2)(image),
        "nn.RMSNorm": lambda: tp.nn.RMSNorm(4)(x),
        "nn.LSTM": lambda: tp.nn.LSTM(4, 4)(sequence),
        "nn.GRU": lambda: tp.nn.GRU(4, 4)(sequence),
        "nn.RNN": lambda: tp.nn.RNN(4, 4)(sequence),
        "nn.LSTMCell": lambda: tp.nn.LSTMCell(4, 4)(cell),
        "nn.GRUCell": lambda: tp.nn.GRUCell(4, 4)(cell),
        "nn.RNNCell": lambda: tp.nn.RNNCell(4, 4)(cell),
        "nn.Embedding": lambda: tp.nn.Embedding(4, 4)(target),
        "nn.EmbeddingBag": lambda: tp.nn.EmbeddingBag(4, 4)(target, tp.tensor([0, 2])),
        "nn.MultiheadAttention": lambda: tp.nn.MultiheadAttention(4, 2)(sequence, sequence, sequence),
        "nn.TransformerEncoderLayer": lambda: tp.nn.TransformerEncoderLayer(4, 2, 8)(sequence),
        "nn.Softmin": lambda: tp.nn.Softmin(1)(x),
        "nn.CrossEntropyLoss": lambda: tp.nn.CrossEntropyLoss()(x, target),
        "nn.NLLLoss": lambda: tp.nn.NLLLoss()(x, target),
        "nn.BCELoss": lambda: tp.nn.BCELoss()(x, w),
        "nn.BCEWithLogitsLoss": lambda: tp.nn.BCEWithLogitsLoss()(x, w),
        "nn.MSELoss": lambda: tp.nn.MSELoss()(x, w),
        "nn.L1Loss": lambda: tp.nn.L1Loss()(x, w),
        "nn.SmoothL1Loss": lambda: tp.nn.SmoothL1Loss()(x, w),
        "nn.HuberLoss": lambda: tp.nn.HuberLoss()(x, w),
        "nn.KLDivLoss": lambda: tp.nn.KLDivLoss(reduction="batchmean")(x, w),
        "nn.CTCLoss": lambda: tp.nn.CTCLoss()(frames, labels, [5, 5], [2, 2]),
        "nn.CosineEmbeddingLoss": lambda: tp.nn.CosineEmbeddingLoss()(x, w, one_sign),
        "nn.HingeEmbeddingLoss": lambda: tp.nn.HingeEmbeddingLoss()(x, signs),
        "nn.MarginRankingLoss": lambda: tp.nn.MarginRankingLoss()(v, v, one_sign),
        "nn.SoftMarginLoss": lambda: tp.nn.SoftMarginLoss()(x, signs),
        "nn.PoissonNLLLoss": lambda: tp.nn.PoissonNLLLoss()(x, w),
        "nn.GaussianNLLLoss": lambda: tp.nn.GaussianNLLLoss()(x, w, positive),
        "nn.MultiLabelSoftMarginLoss": lambda: tp.nn.MultiLabelSoftMarginLoss()(x, signs),
        "nn.MultiMarginLoss": lambda: tp.nn.MultiMarginLoss()(x, target),
        "nn.MultiLabelMarginLoss": lambda: tp.nn.MultiLabelMarginLoss()(x, classes),
        "nn.CosineSimilarity": lambda: tp.nn.CosineSimilarity()(x, w),
        "nn.PairwiseDistance": lambda: tp.nn.PairwiseDistance()(x, w),
        "nn.TripletMarginLoss": lambda: tp.nn.TripletMarginLoss()(x, w, positive),
        "nn.LocalResponseNorm": lambda: tp.nn.LocalResponseNorm(2)(image),
        "nn.Unfold": lambda: tp.nn.Unfold(2)(image),
        "nn.Fold": lambda: tp.nn.Fold((6, 6), 2)(tp.rand(1, 8, 25)),
        "nn.Upsample": lambda: tp.nn.Upsample(scale_factor=2.0)(image),
    }


def _layers() -> dict[str, Callable[[], Any]]:
    """Calls of the modules that exist for one, two and three dimensions, and of those that need no arguments."""
    x, inputs = tp.rand(4, 4), {1: tp.rand(2, 2, 6), 2: tp.rand(2, 2, 6, 6), 3: tp.rand(2, 2, 4, 4, 4)}
    pointwise = (
        "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish PReLU RReLU ReLU ReLU6 SELU "
        "SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink AlphaDropout Dropout FeatureAlphaDropout"
    )
    arguments: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("Conv", "ConvTranspose"), (2, 3, 2)),
        **dict.fromkeys(("MaxPool", "AvgPool", "AdaptiveAvgPool", "BatchNorm", "InstanceNorm"), (2,)),
        **dict.fromkeys(("ReflectionPad", "ReplicationPad", "CircularPad", "ZeroPad"), (1,)),
        "ConstantPad": (1, 0.0),
        "LPPool": (2.0, 2),
        "Dropout": (),
    }
    calls = {f"nn.{name}": lambda name=name: getattr(tp.nn, name)()(x) for name in pointwise.split()}
    for kind, args in arguments.items():
        for number, value in inputs.items():
            name = f"{kind}{number}d"
            calls[f"nn.{name}"] = lambda name=name, args=args, value=value: getattr(tp.nn, name)(*args)(value)
    return calls


def _in_modules() -> dict[str, Callable[[], Any]]:
    """Calls of `tensorplay.linalg`, `tensorplay.fft` and `tensorplay.special`, most of which take one matrix."""
    x, w, v = tp.rand(4, 4), tp.rand(4, 4), tp.rand(4)
    spd = x @ x.t() + tp.eye(4) * 4
    more: dict[str, tuple[Any, ...]] = {
        "cross": (tp.rand(4, 3), tp.rand(4, 3)),
        **dict.fromkeys(("solve", "solve_ex", "lstsq", "matmul", "vecdot"), (spd, w)),
        "vdot": (v, v),
        "lu_solve": (*tp.linalg.lu_factor(spd), w),
        "ldl_solve": (*tp.linalg.ldl_factor(spd), w),
        "householder_product": (x, v),
        "matrix_power": (x, 2),
        "polygamma": (2, x),
        "multigammaln": (x + 5, 2),
        "multi_dot": ([x, w, x],),
        "tensorsolve": (spd, v),
        "tensorinv": (spd, 1),
        "vander": (v,),
        **dict.fromkeys(("softmax", "log_softmax", "logsumexp"), (x, 1)),
        **dict.fromkeys(("gammainc", "gammaincc", "xlogy", "xlog1py", "zeta"), (x + 1, w + 1)),
        **dict.fromkeys(("fftfreq", "rfftfreq"), (4,)),
        **dict.fromkeys(("hfft2", "hfftn", "irfft2", "irfftn", "irfft", "hfft"), (x.to(tp.complex64),)),
    }
    calls: dict[str, Callable[[], Any]] = {}
    for module in (tp.linalg, tp.fft, tp.special):
        for name in sorted(set(module.__all__) - {"LinAlgError", "Tensor", "solve_triangular"}):
            args = (w, tp.tensor(2)) if "polynomial" in name else more.get(name, (spd,))
            calls[f"{module.__name__.rpartition('.')[2]}.{name}"] = functools.partial(
                lambda module, name, args: [getattr(module, name)(*args)], module, name, args
            )
    return calls


def main() -> None:
    """Print, for each name, the ops that its call reaches, in the order in which they are entered."""
    calls = _calls() | _layers() | _in_modules()
    _wrap()
    found: dict[str, list[str]] = {}
    for name, call in calls.items():
        _REACHED.clear()
        try:
            call()
        except Exception as error:
            _REACHED[:] = [f"{type(error).__name__}: {error}"]
        found[name] = list(dict.fromkeys(_REACHED))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
