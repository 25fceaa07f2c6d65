"""RNNs under the policy "apex-o1": all of a layer or cell is in the low dtype, its weights get float32 gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from mezzo.torch import autocast

from .o1_lists import LISTS

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
low_dtypes = pytest.mark.parametrize("low", [BF16, F16], ids=str)

LAYERS: dict[str, Any] = {
    "rnn_tanh": lambda **how: nn.RNN(4, 6, **how),
    "rnn_relu": lambda **how: nn.RNN(4, 6, nonlinearity="relu", **how),
    "gru": lambda **how: nn.GRU(4, 6, **how),
    "lstm": lambda **how: nn.LSTM(4, 6, **how),
}
CELLS: dict[str, Any] = {
    "rnn_tanh_cell": lambda: nn.RNNCell(4, 6),
    "rnn_relu_cell": lambda: nn.RNNCell(4, 6, nonlinearity="relu"),
    "gru_cell": lambda: nn.GRUCell(4, 6),
    "lstm_cell": lambda: nn.LSTMCell(4, 6),
}

# A few steps of sums of 10 products below 1 in absolute value, each rounded to the low dtype; the worst seen is a quarter.
TOLERANCE = {BF16: {"rtol": 0.0, "atol": 2**-5}, F16: {"rtol": 0.0, "atol": 2**-8}}


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, PackedSequence):
        return [value.data]
    return [value] if isinstance(value, Tensor) else [tensor for item in value for tensor in tensors(item)]


def check(found: Any, expected: Any, low: torch.dtype) -> None:
    for result, wanted in zip(tensors(found), tensors(expected), strict=True):
        assert result.dtype is low
        torch.testing.assert_close(result.float(), wanted, **TOLERANCE[low])


def test_every_name_of_the_list_is_here() -> None:
    assert {*LAYERS, *CELLS} == set(LISTS["RNN", "FP16"])


@low_dtypes
@pytest.mark.parametrize("given", ["float32", "low"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("how", [{}, {"bidirectional": True, "num_layers": 2}], ids=["plain", "deep"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_low(name: str, how: dict[str, Any], packed: bool, given: str, low: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name](**how)
    # Values that both dtypes hold.
    sequences = [torch.randn(length, 4).to(BF16).to(low).float() for length in (5, 3)]
    batch: Any = pack_sequence(sequences) if packed else sequences[0][:, None]
    expected = layer(batch)
    with autocast("cpu", dtype=low, policy="apex-o1"):
        found = layer(batch if given == "float32" else batch.to(low))
    check(found, expected, low)
    tensors(found)[0].float().sum().backward()
    assert {weight.grad.dtype for weight in layer.parameters()} == {F32}


@low_dtypes
@pytest.mark.parametrize("given", ["float32", "low"])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_is_low(name: str, given: str, low: torch.dtype) -> None:
    torch.manual_seed(0)
    cell, x = CELLS[name](), torch.randn(3, 4).to(BF16).to(low).float()
    expected = cell(x)
    with autocast("cpu", dtype=low, policy="apex-o1"):
        found = cell(x if given == "float32" else x.to(low))
    check(found, expected, low)
    tensors(found)[0].float().sum().backward()
    assert cell.weight_ih.grad.dtype is F32


@low_dtypes
@pytest.mark.parametrize("name", [*LAYERS, *CELLS])
def test_a_hidden_state_in_float32_is_cast_too(name: str, low: torch.dtype) -> None:
    torch.manual_seed(0)
    module = {**LAYERS, **CELLS}[name]()
    shape = (1, 3, 6) if name in LAYERS else (3, 6)
    state: Any = torch.randn(shape).to(BF16).to(low).float()
    state = (state, state) if "lstm" in name else state
    x = torch.randn(5, 3, 4) if name in LAYERS else torch.randn(3, 4)
    x = x.to(BF16).to(low).float()
    with autocast("cpu", dtype=low, policy="apex-o1"):
        found = module(x, state)
    check(found, module(x, state), low)


@low_dtypes
@pytest.mark.parametrize("name", [*LAYERS, *CELLS])
def test_float64_stays(name: str, low: torch.dtype) -> None:
    module = {**LAYERS, **CELLS}[name]().double()
    x = torch.randn(5, 3, 4, dtype=F64) if name in LAYERS else torch.randn(3, 4, dtype=F64)
    with autocast("cpu", dtype=low, policy="apex-o1"):
        found = module(x)
    assert all(torch.equal(*pair) for pair in zip(tensors(found), tensors(module(x)), strict=True))
