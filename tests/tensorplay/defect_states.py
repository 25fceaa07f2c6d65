"""What native autocast of TensorPlay 1.0 gets wrong with its state: in decorators, checkpoints, functions and compilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorplay as tp
from tensorplay import nn
from tensorplay.utils.checkpoint import checkpoint

from .defects import Amp

# 5. State


def dtype_of_a_kept_leaf(amp: Amp) -> list[Any]:
    """Use one weight in a bfloat16 region and in a float16 region inside of it; give both products' dtypes."""
    weight, ones = tp.ones(4, 4).requires_grad_(), tp.ones(4, 4)
    with amp.region(tp.bfloat16):
        outer = ones @ weight
        with amp.region(tp.float16):
            return [outer.dtype, (ones @ weight).dtype]


def on_after(amp: Amp, use: Callable[[Any], None]) -> bool:
    """Tell whether autocast is left on after ``use`` has used one instance, and put it right."""
    use(amp.region())
    low = (tp.ones(2, 2) @ tp.ones(2, 2)).dtype == tp.bfloat16
    left = bool(tp.is_autocast_enabled("cpu")) or low
    tp.set_autocast_enabled("cpu", False)
    return left


def enter_twice(region: Any) -> None:
    with region, region:
        pass


def recurse(region: Any) -> None:
    @region
    def descend(levels: int) -> None:
        if levels:
            descend(levels - 1)

    descend(3)


def dtype_in_a_generator(amp: Amp) -> Any:
    """Decorate a generator function; give the dtype of a product in its body."""

    @amp.region()
    def products() -> Any:
        yield tp.ones(2, 2) @ tp.ones(2, 2)

    return next(iter(list(products()))).dtype


# 6. Checkpoints


def recomputed(amp: Amp, *, decorated: bool, low: Any = tp.bfloat16, size: int = 64, kept: bool = True) -> list[Any]:
    """Run a layer and a norm under a checkpoint, in a region or decorated by one.

    Args:
        amp: whose autocast.
        decorated: whether the function has a region of its own; else the call of the checkpoint is in one.
        low: the region's dtype.
        size: how many elements the weight has.
        kept: whether a checkpoint is used at all; the numbers are to be the same.

    Returns:
        The result, and the gradients of weight and input.
    """
    tp.manual_seed(0)
    layer, norm, tokens = nn.Linear(8, size // 8), nn.LayerNorm(size // 8), tp.randn(4, 8).requires_grad_()

    def block(x: Any) -> Any:
        return norm(layer(x)).tanh()

    def run(function: Any) -> Any:
        return checkpoint(function, tokens, use_reentrant=False) if kept else function(tokens)

    if decorated:
        result = run(amp.region(low)(block))
    else:
        with amp.region(low):
            result = run(block)
    result.float().sum().backward()
    return [result.detach(), layer.weight.grad, tokens.grad]


# 7. Custom functions


def dtypes_with_cast_inputs(amp: Amp, cast_inputs: Any) -> list[Any]:
    """Give the dtypes in which a custom function with ``cast_inputs`` sees a float32 and a float64 tensor."""
    seen: list[Any] = []

    class Look(tp.autograd.Function):
        @staticmethod
        @amp.module.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(_: Any, single: Any, double: Any) -> Any:
            seen.extend([single.dtype, double.dtype])
            return single * 1

        @staticmethod
        @amp.module.custom_bwd(device_type="cpu")
        def backward(_: Any, gradient: Any) -> Any:
            return gradient, None

    with amp.region():
        Look.apply(tp.ones(2).requires_grad_(), tp.ones(2, dtype=tp.float64))
    return seen


# 8. Compiled functions


def dtypes_of_compiled(amp: Amp) -> dict[str, Any]:
    """Give the dtype of a product in a compiled function, with the region inside of it and around the call."""
    weight = tp.ones(4, 4)

    def product(x: Any) -> Any:
        return x @ weight

    def in_region(x: Any) -> Any:
        with amp.region():
            return x @ weight

    with amp.region():
        around = tp.compile(product)(tp.ones(4, 4)).dtype
    return {"inside": tp.compile(in_region)(tp.ones(4, 4)).dtype, "around": around}
