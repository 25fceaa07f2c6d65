"""Section C, first part: calls that mix dtypes, or come in a dtype without a kernel.

The default policy mends them: inputs go to the widest dtype among them, what is written into a tensor to that tensor's
dtype, and what has no kernel in a lower precision runs in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .amps import Amp, assert_near, low_dtypes

ROWS = torch.tensor([0, 2, 1])
PLACES = torch.tensor([[0, 1, 2, 3], [2, 3, 0, 1], [1, 0, 3, 2]])
CHOSEN = torch.arange(16).view(4, 4) % 3 > 0
GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(2, 4, 4, generator=GENERATOR)
X, Y = torch.randn(2, 4, 4, generator=GENERATOR).unbind()

# Exact in every dtype.
FRACTIONS = torch.arange(16).view(4, 4) / 16

Call = Callable[[Tensor, Tensor], Tensor]

# Results are in the widest dtype.
WIDEST: dict[str, Call] = {
    "index_put": lambda x, y: torch.index_put(x, (ROWS,), y[:3]),
    "index_put accumulate": lambda x, y: torch.index_put(x, (ROWS,), y[:3], accumulate=True),
    "scatter": lambda x, y: torch.scatter(x, 0, PLACES, y),
    "scatter_add": lambda x, y: torch.scatter_add(x, 0, PLACES, y),
    "scatter_reduce": lambda x, y: torch.scatter_reduce(x, 0, PLACES, y, "amax"),
    "index_add": lambda x, y: torch.index_add(x, 0, ROWS, y[:3], alpha=2),
    "masked_scatter": lambda x, y: torch.masked_scatter(x, CHOSEN, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "lerp tensor": lambda x, y: torch.lerp(x, y, FRACTIONS.to(y.dtype)),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "vdot": lambda x, y: torch.vdot(x[0], y[0]),
    "mv": lambda x, y: torch.mv(x, y[0]),
    "addmv": lambda x, y: torch.addmv(x[0], y, x[1]),
    "linalg.cross": lambda x, y: torch.linalg.cross(x[:, :3], y[:, :3]),
}
# Made up of matrix products, which the region makes in its own dtype.
PRODUCTS: dict[str, Call] = {
    "inner": torch.inner,
    "tensordot": lambda x, y: torch.tensordot(x, y, 1),
    "multi_dot": lambda x, y: torch.linalg.multi_dot([x, y, x]),
}
# The tensor that is written into keeps its dtype.
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "index_put_": lambda x, y: x.index_put_((ROWS,), y[:3]),
    "x[rows] = y": lambda x, y: x.__setitem__(ROWS, y[:3]),
    "scatter_": lambda x, y: x.scatter_(0, PLACES, y),
    "scatter_add_": lambda x, y: x.scatter_add_(0, PLACES, y),
    "scatter_reduce_": lambda x, y: x.scatter_reduce_(0, PLACES, y, "prod"),
    "index_add_": lambda x, y: x.index_add_(0, ROWS, y[:3]),
    "masked_scatter_": lambda x, y: x.masked_scatter_(CHOSEN, y),
    "lerp_": lambda x, y: x.lerp_(y, 0.25),
    "mv out": lambda x, y: torch.mv(y, y[0], out=x[0]),
    "addmv_": lambda x, y: x[0].addmv_(y, y[1]),
}
orders = pytest.mark.parametrize("low_first", [True, False], ids=["low-float32", "float32-low"])


def mixed(low: torch.dtype, low_first: bool) -> tuple[Tensor, Tensor]:
    return (X.to(low), Y.clone()) if low_first else (X.clone(), Y.to(low))


@low_dtypes
@orders
@pytest.mark.parametrize("call", WIDEST.values(), ids=WIDEST)
def test_c1_mixed_inputs_are_promoted(amp: Amp, low: torch.dtype, low_first: bool, call: Call) -> None:
    """C1: inputs of different dtypes go to the widest; the result is exact to float32."""
    x, y = mixed(low, low_first)
    with amp.region(low):
        result = call(x, y)
    assert_near(result, call(x.double(), y.double()), torch.float32)


@low_dtypes
@orders
@pytest.mark.parametrize("call", PRODUCTS.values(), ids=PRODUCTS)
def test_c1_mixed_products_are_made_in_the_regions_dtype(
    amp: Amp, low: torch.dtype, low_first: bool, call: Call
) -> None:
    """C1: what consists of matrix products gives, of mixed inputs too, what it gives of float32 ones."""
    x, y = mixed(low, low_first)
    with amp.region(low):
        result = call(x, y)
    assert_near(result, call(x.double(), y.double()), low)


@low_dtypes
@orders
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_c1_what_is_written_takes_the_dtype_of_its_destination(
    amp: Amp, low: torch.dtype, low_first: bool, write: Callable[[Tensor, Tensor], Any]
) -> None:
    """C1: a write into a tensor casts its source, in both directions, and leaves the tensor where it is."""
    x, y = mixed(low, low_first)
    reference, address = x.double(), x.data_ptr()
    write(reference, y.double())
    with amp.region(low):
        write(x, y)
    assert x.data_ptr() == address
    assert_near(x, reference, low if low_first else torch.float32)


@low_dtypes
@orders
def test_c1_gradients_come_back_in_the_dtypes_that_came_in(amp: Amp, low: torch.dtype, low_first: bool) -> None:
    """C1: a promoted call is differentiable, each gradient in its input's dtype."""
    x, y = (tensor.requires_grad_() for tensor in mixed(low, low_first))
    with amp.region(low):
        torch.index_add(x, 0, ROWS, y[:3]).square().sum().backward()
    reference = [tensor.detach().double().requires_grad_() for tensor in (x, y)]
    torch.index_add(reference[0], 0, ROWS, reference[1][:3]).square().sum().backward()
    for got, wanted in zip((x, y), reference, strict=True):
        assert_near(got.grad, wanted.grad, got.dtype)


@low_dtypes
@orders
def test_c1_bilinear_layer_takes_activations_of_the_region(amp: Amp, low: torch.dtype, low_first: bool) -> None:
    """C1: `nn.Bilinear` takes a lower-precision input next to a float32 one and its own float32 weights.

    The products in it are the region's, as they are when all is float32; the result is float32.
    """
    x, y = mixed(low, low_first)
    layer = nn.Bilinear(4, 4, 2)
    with amp.region(low):
        result = layer(x, y)
    reference = F.bilinear(x.double(), y.double(), layer.weight.double(), layer.bias.double())
    assert_near(result, reference, torch.float32, computed=low)


# C8: layouts and dtypes without a kernel


@low_dtypes
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_c8_sparse_softmax_runs_in_float32(amp: Amp, low: torch.dtype, name: str) -> None:
    """C8: the softmax of a sparse matrix, which has no lower-precision kernel, runs in float32."""
    function = getattr(torch.sparse, name)
    matrix = (X * CHOSEN).to(low).to_sparse()
    with amp.region(low):
        result = function(matrix, 1)
    assert_near(result.to_dense(), function(matrix.double(), 1).to_dense(), torch.float32)


COMPRESSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, y: x @ y,
    "mv": lambda x, y: x @ y[0],
    "addmm": lambda x, y: torch.addmm(y, x, y),
    "sparse.mm": torch.sparse.mm,
    "linear": lambda x, y: F.linear(y, x),
}


@low_dtypes
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("stored_low", [True, False], ids=["low", "float32"])
@pytest.mark.parametrize("call", COMPRESSED.values(), ids=COMPRESSED)
def test_c8_compressed_matrix_runs_in_float32(amp: Amp, low: torch.dtype, stored_low: bool, call: Call) -> None:
    """C8: a CSR matrix times a dense one, which has no lower-precision kernel, runs in float32."""
    x, y = ((X * CHOSEN).to(low), Y.to(low)) if stored_low else (X * CHOSEN, Y.clone())
    with amp.region(low):
        result = call(x.to_sparse_csr(), y)
    assert_near(result, call(x.double(), y.double()), torch.float32)


# C13, in the text of top 15 no. 8


@low_dtypes
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_c13_transformer_encoder_with_a_padding_mask(amp: Amp, low: torch.dtype, activation: str, context: Any) -> None:
    """C13, top 15 no. 8: the stock encoder in eval mode takes a padding mask; padded places come out as zeros."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, activation=activation, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with context():
        reference = encoder(x, src_key_padding_mask=padding)
        with amp.region(low):
            result = encoder(x, src_key_padding_mask=padding)
    assert_near(result, reference, low)
    assert result[1, 3:].abs().max() == 0
