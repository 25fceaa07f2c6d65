"""CPU kernels of the three listed ops that PyTorch has for accelerators only, so that a CPU can stand in for one.

They do the arithmetic in the dtype that comes in. Backward is there too.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gru(gates: Tensor, hidden_gates: Tensor, hidden: Tensor, *biases: Tensor | None) -> tuple[Tensor, Tensor]:
    gates, hidden_gates = _biased(gates, hidden_gates, *biases)
    reset, update, new = gates.chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = hidden_gates.chunk(3, 1)
    reset, update = (reset + hidden_reset).sigmoid(), (update + hidden_update).sigmoid()
    new = (new + reset * hidden_new).tanh()
    return (hidden - new) * update + new, torch.cat([reset, update, new, hidden, hidden_new], 1)


def gru_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    reset, update, new, hidden, hidden_new = workspace.chunk(5, 1)
    of_new = grad * (1 - update) * (1 - new * new)
    of_reset = of_new * hidden_new * reset * (1 - reset)
    of_update = grad * (hidden - new) * update * (1 - update)
    gates = torch.cat([of_reset, of_update, of_new], 1)
    hidden_gates = torch.cat([of_reset, of_update, of_new * reset], 1)
    biases = (gates.sum(0), hidden_gates.sum(0)) if has_bias else (None, None)
    return gates, hidden_gates, grad * update, *biases


def lstm(gates: Tensor, hidden_gates: Tensor, cell: Tensor, *biases: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    own, hidden = _biased(gates, hidden_gates, *biases)
    enter, forget, new, leave = (own + hidden).chunk(4, 1)
    enter, forget, new, leave = enter.sigmoid(), forget.sigmoid(), new.tanh(), leave.sigmoid()
    cell = forget * cell + enter * new
    return leave * cell.tanh(), cell, torch.cat([enter, forget, new, leave], 1)


def lstm_backward(
    grad: Tensor | None, grad_cell: Tensor | None, cell: Tensor, new_cell: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    enter, forget, new, leave = workspace.chunk(4, 1)
    shown = new_cell.tanh()
    grad = torch.zeros_like(cell) if grad is None else grad
    of_cell = grad * leave * (1 - shown * shown)
    of_cell = of_cell if grad_cell is None else of_cell + grad_cell
    gates = torch.cat(
        [
            of_cell * new * enter * (1 - enter),
            of_cell * cell * forget * (1 - forget),
            of_cell * enter * (1 - new * new),
            grad * shown * leave * (1 - leave),
        ],
        1,
    )
    return gates, of_cell * forget, gates.sum(0) if has_bias else None


def attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[object, ...]:
    scores = query @ key.transpose(-1, -2) / query.size(-1) ** 0.5
    nothing = query.new_empty(0)
    sums = scores.float().logsumexp(-1)
    lengths = nothing, nothing, query.size(2), key.size(2)
    return scores.softmax(-1) @ value, sums, *lengths, nothing, nothing, nothing


def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, ...]:
    scale = query.size(-1) ** -0.5
    shares = (query @ key.transpose(-1, -2) * scale).softmax(-1)
    of_shares = grad @ value.transpose(-1, -2)
    of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True)) * scale
    return of_scores @ key, of_scores.transpose(-1, -2) @ query, shares.transpose(-1, -2) @ grad


def _biased(gates: Tensor, hidden_gates: Tensor, *biases: Tensor | None) -> tuple[Tensor, Tensor]:
    own, hidden = (*biases, None, None)[:2]
    return (gates if own is None else gates + own), (hidden_gates if hidden is None else hidden_gates + hidden)


KERNELS = {
    "_thnn_fused_gru_cell": gru,
    "_thnn_fused_gru_cell_backward": gru_backward,
    "_thnn_fused_lstm_cell": lstm,
    "_thnn_fused_lstm_cell_backward_impl": lstm_backward,
    "_scaled_dot_product_flash_attention": attention,
    "_scaled_dot_product_flash_attention_backward": attention_backward,
}


def supply() -> torch.library.Library:
    """Register the kernels; they are there for as long as the library that is returned."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    for op, kernel in KERNELS.items():
        library.impl(op, kernel)
    return library
