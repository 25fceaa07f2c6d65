"""Float16 products in float32: the same numbers as float16's own kernels up to the rounding of their sums."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from mezzo.demo.emulation import EmulatedProducts, emulated_products, float16_cost
from mezzo.demo.memory import LiveStorages

# A sum of n products that is rounded to float16 after each differs from one rounded once by n halves of
# float16's 2**-10 at most; the sums here have up to 72 terms, and errors of both signs.
TOLERANCE = {"rtol": 1e-2, "atol": 1e-2}


def convolution(images, kernels):
    return functional.conv2d(images, kernels, padding=1)


def attention(queries, keys):
    return functional.scaled_dot_product_attention(queries, keys, keys)


CASES = {
    "convolution": (convolution, (2, 8, 6, 6), (4, 8, 3, 3)),
    "linear": (functional.linear, (5, 16), (7, 16)),
    "matmul": (torch.matmul, (3, 5, 16), (3, 16, 7)),
    "attention": (attention, (2, 2, 6, 8), (2, 2, 6, 8)),
}


def value_and_gradients(function, *tensors):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    result = function(*leaves)
    result.backward(torch.ones_like(result))
    return [result.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_float16(name):
    """Against PyTorch's float16 kernels, and, bit for bit, against float32 on the same numbers, rounded."""
    function, *shapes = CASES[name]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).half() for shape in shapes]
    with EmulatedProducts():
        emulated = value_and_gradients(function, *tensors)
    native = value_and_gradients(function, *tensors)
    wide = value_and_gradients(function, *(tensor.float() for tensor in tensors))
    for ours, theirs, exact in zip(emulated, native, wide, strict=True):
        assert ours.dtype == torch.float16
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
        torch.testing.assert_close(ours, exact.half(), rtol=2**-10, atol=2**-10)


def test_results_overflow_where_float16_ends():
    """200 * 200 * 2 is above 65,504, its largest number."""
    row = torch.full((1, 2), 200.0, dtype=torch.float16)
    with EmulatedProducts():
        assert (row @ row.t()).item() == float("inf")
        assert (row @ (row / 2).t()).item() == 40_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_other_dtypes_are_left_alone(dtype):
    square = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    with EmulatedProducts():
        product = square @ square
    assert product.dtype == dtype
    assert torch.equal(product, square @ square)


def test_other_operators_are_left_alone():
    """An elementwise sum is float16's own, rounded as it rounds."""
    left, right = torch.full((3,), 2048.0).half(), torch.ones(3).half()
    with EmulatedProducts():
        assert torch.equal(left + right, left)


def test_the_float32_copies_are_no_part_of_the_measured_memory():
    """Memory is what float16's own kernels take: two factors and a product of 64 x 64, two bytes each."""
    with EmulatedProducts(), LiveStorages() as storages:
        square = torch.ones(64, 64, dtype=torch.float16)
        other = torch.ones(64, 64, dtype=torch.float16)
        product = square @ other
    assert product.dtype == torch.float16
    assert storages.peak_bytes == 3 * 64 * 64 * 2


def test_an_evaluated_transformer_layer_is_in_float16_too():
    """PyTorch's fused layer would run in float32 under the mode; the setting comes back, by exception too."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    rows = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16), emulated_products():
        emulated = layer(rows)
    with torch.no_grad():
        plain = layer(rows)
    # Float16 keeps 10 bits; float32's kernels agree to 20, whichever way the layer goes.
    assert 2**-18 < (emulated - plain).abs().max() < 2**-7
    with pytest.raises(KeyError), emulated_products():
        assert not torch.backends.mha.get_fastpath_enabled()
        raise KeyError
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_cost_is_a_ratio_of_times():
    """Between a hundredth and ten thousand, on any processor; accelerators have float16 and are not measured."""
    assert 0.01 < float16_cost(torch.device("cpu")) < 10_000
    assert float16_cost(torch.device("cuda")) == 1
