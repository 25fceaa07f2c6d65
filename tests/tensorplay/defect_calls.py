"""Calls that native autocast of TensorPlay 1.0 gets wrong: dtypes that are mixed, and ops without a low kernel.

Each is given with inputs that keep their values in every dtype (multiples of 1/8 up to 2), so that an error is the
call's, not the rounding of what came in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorplay as tp
import tensorplay.nn.functional as F
from tensorplay import nn

ROWS = tp.tensor([2, 0, 1])
PLACES = tp.tensor([[0, 1, 2, 0], [1, 2, 0, 1], [2, 0, 1, 2]])
RECURRENT = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}


@dataclass(frozen=True)
class Call:
    """A call and the shapes of its inputs.

    Args:
        function: what is called, with one tensor for each shape.
        shapes: the shapes of the inputs.
        first: which float dtype the first input has where dtypes are mixed: the low one, or that of the others,
            with the low one for the others.
    """

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    first: str = "low"

    def inputs(self) -> list[Any]:
        """Make the inputs, in float32; none is zero."""
        tp.manual_seed(0)
        return [(tp.randint(1, 17, shape) * (tp.randint(0, 2, shape) * 2 - 1)).float() / 8 for shape in self.shapes]

    def low(self, low: Any) -> list[Any]:
        return [tensor.to(low) for tensor in self.inputs()]

    def mixed(self, low: Any, other: Any = tp.float32) -> list[Any]:
        """Make the inputs with ``low`` for the first and ``other`` for the rest, or the other way round."""
        first, *rest = self.inputs()
        ones, others = (low, other) if self.first == "low" else (other, low)
        return [first.to(ones), *(tensor.to(others) for tensor in rest)]

    def run(self, inputs: list[Any]) -> Any:
        return self.function(*inputs)

    def run_and_back(self, inputs: list[Any]) -> list[Any]:
        """Run the call and its backward pass; give the gradients."""
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        result = self.function(*[tensor * 1 for tensor in inputs])
        (result.float() * (1 + tp.arange(result.numel()).view(result.shape) % 3)).sum().backward()
        return [tensor.grad for tensor in inputs]


def error_of(call: Call, inputs: list[Any]) -> float:
    """Give the largest error of the result, over the largest value of what float32 gives. NaN stays NaN."""
    result = call.run(inputs).float()
    with tp.autocast("cpu", enabled=False):
        exact = call.run(call.inputs())
    return (result - exact).abs().max().item() / exact.abs().max().item()


def add_at(x: Any, y: Any) -> Any:
    return tp.index_put(x, (ROWS,), y, accumulate=True)


def put_at(x: Any, y: Any) -> Any:
    return x.clone().index_put_((ROWS,), y)


def placed_mean(x: Any, mean: Any, variance: Any) -> Any:
    return F.batch_norm(x, mean, variance.abs(), training=False)


PAIR = ((3, 4), (3, 4))
VECTORS = ((4,), (4,))
NORM = ((3, 4), (4,), (4,))

MIXED_RAISES = {
    "index_put": Call(add_at, PAIR),
    "index_put_": Call(put_at, PAIR),
    "index_put_ float32": Call(put_at, PAIR, first="other"),
    "put_": Call(lambda x, y: x.clone().put_(ROWS, y), ((3, 4), (3,))),
    "masked_scatter": Call(lambda x, y: tp.masked_scatter(x, x > 0, y), PAIR),
    "index_reduce": Call(lambda x, y: tp.index_reduce(x, 0, ROWS, y, "amax"), PAIR),
    "scatter_reduce": Call(lambda x, y: tp.scatter_reduce(x, 0, PLACES, y, "sum"), PAIR),
    "dot": Call(tp.dot, VECTORS),
    "outer": Call(tp.outer, VECTORS),
    "cross": Call(tp.linalg.cross, ((4, 3), (4, 3))),
    "batch_norm with low statistics": Call(placed_mean, NORM, first="other"),
}

MIXED_WRONG = {
    "layer_norm": Call(lambda x, w, b: F.layer_norm(x, (4,), w, b), NORM),
    "layer_norm with low weights": Call(lambda x, w, b: F.layer_norm(x, (4,), w, b), NORM, first="other"),
    "rms_norm with a low weight": Call(lambda x, w: F.rms_norm(x, (4,), w), ((3, 4), (4,)), first="other"),
    "index_add": Call(lambda x, y: tp.index_add(x, 0, ROWS, y), PAIR),
    "index_add float32": Call(lambda x, y: tp.index_add(x, 0, ROWS, y), PAIR, first="other"),
    "index_add_": Call(lambda x, y: x.clone().index_add_(0, ROWS, y), PAIR),
    "index_add_ float32": Call(lambda x, y: x.clone().index_add_(0, ROWS, y), PAIR, first="other"),
    "addmv": Call(tp.addmv, ((3,), (3, 4), (4,))),
    "addmv_": Call(lambda x, m, v: x.clone().addmv_(m, v), ((3,), (3, 4), (4,))),
}

# The package gets these wrong, or raises, without autocast; its tables have them, so in a region they are right.
MIXED_RIGHT = {
    "index_copy": Call(lambda x, y: tp.index_copy(x, 0, ROWS, y), PAIR),
    "index_copy_": Call(lambda x, y: x.clone().index_copy_(0, ROWS, y), PAIR),
    "nll_loss": Call(lambda x, w: F.nll_loss(x, ROWS, weight=w.abs()), ((3, 4), (4,))),
    "nll_loss with a low weight": Call(lambda x, w: F.nll_loss(x, ROWS, weight=w.abs()), ((3, 4), (4,)), first="other"),
}

LOW_RAISES = {
    "max_pool1d": Call(lambda x: F.max_pool1d(x, 2), ((2, 3, 8),)),
    "max_pool2d": Call(lambda x: F.max_pool2d(x, 2), ((2, 3, 8, 8),)),
    "avg_pool1d": Call(lambda x: F.avg_pool1d(x, 2), ((2, 3, 8),)),
    "avg_pool2d": Call(lambda x: F.avg_pool2d(x, 2), ((2, 3, 8, 8),)),
    "lp_pool2d": Call(lambda x: F.lp_pool2d(x, 2.0, 2), ((2, 3, 8, 8),)),
    "adaptive_avg_pool1d": Call(lambda x: F.adaptive_avg_pool1d(x, 2), ((2, 3, 8),)),
    "adaptive_avg_pool2d": Call(lambda x: F.adaptive_avg_pool2d(x, 2), ((2, 3, 8, 8),)),
    "group_norm": Call(lambda x: F.group_norm(x, 2), ((2, 4, 8, 8),)),
    "instance_norm backward": Call(F.instance_norm, ((2, 4, 8, 8),)),
    "interpolate nearest": Call(lambda x: F.interpolate(x, scale_factor=2), ((2, 3, 8, 8),)),
    "interpolate bilinear": Call(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ((2, 3, 8, 8),)),
}

LOW_WRONG = {"addmv": Call(tp.addmv, ((3,), (3, 4), (4,)))}

# What is not wrong, but other than PyTorch's: for bfloat16 inputs, the dtype of the result, and PyTorch's beside it.
DIFFERENCES = {
    "norm": (tp.norm, "float32", "bfloat16"),
    "l1_loss": (lambda x: F.l1_loss(x, x), "bfloat16", "float32"),
    "binary_cross_entropy_with_logits": (lambda x: F.binary_cross_entropy_with_logits(x, x), "bfloat16", "float32"),
    "kl_div": (lambda x: F.kl_div(x, x, reduction="sum"), "bfloat16", "float32"),
    "LSTM of a float32 input": (lambda x: nn.LSTM(4, 4)(x.float())[0], "float32", "bfloat16"),
}
