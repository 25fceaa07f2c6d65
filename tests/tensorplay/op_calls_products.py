"""Sample calls: products, convolutions, recurrent cells and attention."""

from __future__ import annotations

from tests.tensorplay.op_samples import Call, call, integers, matrix, normal, positive

__all__ = ["PRODUCTS"]

X, Y, B = normal(3, 4), normal(4, 5), normal(3, 5)
IMAGE1, IMAGE2, IMAGE3 = normal(1, 2, 6), normal(1, 2, 6, 6), normal(1, 2, 4, 4, 4)
SEQUENCE, STATE = normal(3, 2, 4), normal(1, 2, 5)
HEADS = normal(1, 2, 3, 4)


def gates(count: int) -> list[object]:
    """Give the weights of a recurrent layer with so many gates."""
    return [normal(count * 5, 4) / 4, normal(count * 5, 5) / 4, normal(count * 5), normal(count * 5)]


def recurrent(op: str, count: int) -> list[Call]:
    """Call a recurrent layer and its cell."""
    layer = call(op, SEQUENCE, STATE, gates(count), True, 1, 0.0, False, False, False)
    return [layer, call(f"{op}_cell", SEQUENCE[0], STATE[0], *gates(count))]


PRODUCTS: list[Call] = [
    call("_addmm_activation", B, X, Y),
    call(
        "_convolution",
        IMAGE2,
        normal(3, 2, 3, 3),
        normal(3),
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
        False,
        False,
        False,
        False,
    ),
    call(
        "_native_multi_head_attention",
        normal(2, 3, 4),
        normal(2, 3, 4),
        normal(2, 3, 4),
        4,
        2,
        normal(12, 4),
        normal(12),
        normal(4, 4),
        normal(4),
    ),
    call("addbmm", B, normal(2, 3, 4), normal(2, 4, 5)),
    call("addmm", B, X, Y),
    call("addmv", normal(3), X, normal(4)),
    call("addr", X, normal(3), normal(4)),
    call("baddbmm", normal(2, 3, 5), normal(2, 3, 4), normal(2, 4, 5)),
    call("bilinear", X, B, normal(2, 4, 5), normal(2)),
    call("bmm", normal(2, 3, 4), normal(2, 4, 5)),
    call("chain_matmul", [X, Y, normal(5, 2)]),
    call("conv1d", IMAGE1, normal(3, 2, 3), normal(3)),
    call("conv2d", IMAGE2, normal(3, 2, 3, 3), normal(3)),
    call("conv3d", IMAGE3, normal(3, 2, 3, 3, 3), normal(3)),
    call("conv_tbc", normal(6, 2, 3), normal(3, 3, 4), normal(4)),
    call("conv_transpose1d", IMAGE1, normal(2, 3, 3), normal(3)),
    call("conv_transpose2d", IMAGE2, normal(2, 3, 3, 3), normal(3)),
    call("conv_transpose3d", IMAGE3, normal(2, 3, 3, 3, 3), normal(3)),
    call("convolution", IMAGE2, normal(3, 2, 3, 3), normal(3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    call("dot", normal(4), positive(4)),
    call("einsum", "ij,jk->ik", [X, Y]),
    call("inner", X, normal(5, 4)),
    call("linalg_matmul", X, Y),
    call("linalg_matrix_power", matrix(3, 3), 3),
    call("linalg_multi_dot", [X, Y, normal(5, 2)]),
    call("linalg_vecdot", X, positive(3, 4)),
    call("linear", X, normal(5, 4), normal(5)),
    call("matmul", X, Y),
    call("matrix_power", matrix(3, 3), 3),
    call("mm", X, Y),
    call("mv", X, normal(4)),
    call("outer", normal(3), positive(4)),
    call("scaled_dot_product_attention", HEADS, HEADS, normal(1, 2, 3, 4)),
    call("tensordot", X, Y, [1], [0]),
    call("vdot", normal(4), positive(4)),
    call("lstm", SEQUENCE, [STATE, STATE], gates(4), True, 1, 0.0, False, False, False),
    call("lstm_cell", SEQUENCE[0], STATE[0], STATE[0] / 2, *gates(4)),
    *recurrent("gru", 3),
    *recurrent("rnn_relu", 1),
    *recurrent("rnn_tanh", 1),
    call("_embedding_bag", normal(5, 4), integers(0, 1, 2, 4), integers(0, 2), False, 0, False, positive(4), False),
]
