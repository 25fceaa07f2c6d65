"""Sample calls: linear algebra and Fourier transforms."""

from __future__ import annotations

import numpy as np

from tests.tensorplay.op_samples import Call, call, matrix, normal, positive, symmetric

__all__ = ["LINALG"]

A, S, B = matrix(3, 3), symmetric(3), normal(3, 2)
LOWER = np.asarray(np.linalg.cholesky(S.astype(np.float64)), dtype=np.float32)
TALL = normal(4, 3)
SPECTRUM = np.asarray(np.fft.rfft(normal(4, 6)), dtype=np.complex64)
PIVOTS = np.asarray([1, 2, 3], dtype=np.int32)

LINALG: list[Call] = [
    call("_lu_with_info", A),
    call("cholesky", S),
    call("cholesky_inverse", LOWER),
    call("cholesky_solve", B, LOWER),
    call("fft_fft", TALL),
    call("fft_fft2", TALL),
    call("fft_ifft", TALL),
    call("fft_ifft2", TALL),
    call("fft_irfft", SPECTRUM),
    call("fft_irfft2", SPECTRUM),
    call("fft_rfft", TALL),
    call("fft_rfft2", TALL),
    call("geqrf", TALL),
    call("inverse", A),
    call("linalg_cholesky", S),
    call("linalg_cholesky_ex", S),
    call("linalg_cond", A),
    call("linalg_det", A),
    call("linalg_eig", S),
    call("linalg_eigh", S),
    call("linalg_eigvals", S),
    call("linalg_eigvalsh", S),
    call("linalg_householder_product", TALL, normal(3)),
    call("linalg_inv", A),
    call("linalg_inv_ex", A),
    call("linalg_lstsq", TALL, normal(4, 2)),
    call("linalg_matrix_rank", A),
    call("linalg_pinv", TALL),
    call("linalg_qr", A),
    call("linalg_slogdet", A),
    call("linalg_solve", A, B),
    call("linalg_svd", TALL),
    call("linalg_svdvals", TALL),
    call("linalg_tensorinv", np.asarray(matrix(4, 4).reshape(2, 2, 4)), 2),
    call("linalg_tensorsolve", matrix(3, 3), normal(3)),
    call("lu_solve", B, A, PIVOTS),
    call("matrix_exp", A),
    call("orgqr", TALL, normal(3)),
    call("ormqr", TALL, normal(3), normal(4, 2)),
    call("pinverse", TALL),
    call("stft", normal(1, 24).reshape(24), 8, 4, 8, positive(8), False),
    call("svd", TALL),
    call("trace", A),
    call("triangular_solve", B, LOWER, False),
    call("cov", TALL),
    call("corrcoef", TALL),
    call(
        "mkldnn_rnn_layer",
        normal(3, 2, 4),
        normal(20, 4),
        normal(20, 5),
        normal(20),
        normal(20),
        normal(1, 2, 5),
        normal(1, 2, 5),
        False,
        [],
        2,
        5,
        1,
        True,
        False,
        False,
        False,
    ),
]
