"""Float16 on processors without float16 arithmetic: how slow PyTorch's own kernels are there, and a way around."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SLOW = 3.0
"""Float16 counts as slow above this multiple of float32's time. Emulation takes 1.0 to 1.3 times that, measured."""

_aten = torch.ops.aten
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 - has no public name
PRODUCTS = frozenset(
    {
        _aten.convolution.default,
        _aten.convolution_backward.default,
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _ATTENTION,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,  # noqa: SLF001
    }
)


class EmulatedProducts(TorchDispatchMode):  # PyTorch's
    """While active, products of float16 tensors are computed in float32 and rounded to float16 once.

    A GPU's matrix units do that too: float16 factors, float32 sums. So values and gradients overflow and
    underflow where they do there, and memory is float16's: only the time is not. Everything else,
    autocast and the gradient scaler too, runs as without it. The mode belongs to the thread that enters it.

    Example:
        >>> row = torch.full((1, 4), 200.0, dtype=torch.float16)
        >>> with EmulatedProducts():
        ...     print(row @ row.t())
        tensor([[inf]], dtype=torch.float16)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, in float32 if it is a product of float16 tensors."""
        keywords = kwargs or {}
        if func not in PRODUCTS or not any(_is(value, torch.float16) for value in args):
            return func(*args, **keywords)
        wide = func(*tree_map(_widened, args), **tree_map(_widened, keywords))
        if func is _ATTENTION:  # its second result, sums of exponentials, is float32 in any case
            return _narrowed(wide[0]), wide[1]
        return tree_map(_narrowed, wide)


@contextmanager
def emulated_products() -> Iterator[None]:
    """`EmulatedProducts`, and PyTorch's fused transformer layer put aside until the end of the region.

    Under a dispatch mode that layer, which is taken in evaluation, runs its products without autocast: not in float16,
    and not at all where only the weights are float16. The setting is one of the whole process.

    Example:
        >>> with emulated_products():
        ...     torch.backends.mha.get_fastpath_enabled()
        False
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with EmulatedProducts():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _is(value: object, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype


def _widened(value: Any) -> Any:
    return value.float() if _is(value, torch.float16) else value


def _narrowed(value: Any) -> Any:
    return value.half() if _is(value, torch.float32) else value


def float16_cost(device: torch.device) -> float:
    """Measure how many times as long as in float32 a convolution and a linear layer take in float16.

    Takes some tenths of a second on a CPU; on other devices nothing is measured and the answer is 1: they have
    float16 arithmetic.
    """
    if device.type != "cpu":
        return 1.0
    return _products_seconds(torch.float16) / _products_seconds(torch.float32)


def _products_seconds(dtype: torch.dtype) -> float:
    images = torch.ones(16, 32, 8, 8, dtype=dtype, requires_grad=True)
    kernels = torch.ones(32, 32, 3, 3, dtype=dtype, requires_grad=True)
    rows = torch.ones(512, 64, dtype=dtype, requires_grad=True)
    weights = torch.ones(64, 64, dtype=dtype, requires_grad=True)

    def once() -> float:
        start = time.perf_counter()
        total = functional.conv2d(images, kernels, padding=1).sum() + functional.linear(rows, weights).sum()
        total.backward()
        return time.perf_counter() - start

    once()  # the first call sets kernels up
    return min(once() for _ in range(3))
