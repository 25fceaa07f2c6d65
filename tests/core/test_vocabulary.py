"""Op names: every spelling resolves to the ops it stands for, and nothing else does."""

from __future__ import annotations

import pytest

from mezzo import UnknownOpError
from mezzo.vocabulary import vocabulary

words = vocabulary("torch")

# The op lists of PyTorch's page on automatic mixed precision (2.13 and the newest), as names; ops that only one of the
# two has are here too.
CUDA_PAGE = """
__matmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot conv1d conv2d conv3d conv_transpose1d
conv_transpose2d conv_transpose3d GRUCell linear LSTMCell matmul mm mv prelu RNNCell __pow__ __rdiv__ __rpow__
__rtruediv__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist cosine_similarity
cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm log
log_softmax log10 log1p log2 margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss nll_loss norm
normalize pdist poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin
softplus sum renorm tan triplet_margin_loss addcdiv addcmul atan2 bilinear cross dot grid_sample index_put scatter_add
tensordot binary_cross_entropy
""".split()
CPU_PAGE = """
conv1d conv2d conv3d bmm mm linalg_vecdot baddbmm addmm addbmm linear matmul _convolution conv_tbc mkldnn_rnn_layer
conv_transpose1d conv_transpose2d conv_transpose3d prelu scaled_dot_product_attention _native_multi_head_attention
avg_pool3d binary_cross_entropy grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback grid_sampler_3d polar prod
quantile nanquantile stft cdist trace view_as_complex cholesky cholesky_inverse cholesky_solve inverse lu_solve orgqr
ormqr pinverse max_pool3d max_unpool2d max_unpool3d adaptive_avg_pool3d reflection_pad1d reflection_pad2d
replication_pad1d replication_pad2d replication_pad3d mse_loss cosine_embedding_loss nll_loss nll_loss2d
hinge_embedding_loss poisson_nll_loss cross_entropy_loss l1_loss huber_loss margin_ranking_loss soft_margin_loss
triplet_margin_loss multi_margin_loss ctc_loss kl_div multilabel_margin_loss binary_cross_entropy_with_logits fft_fft
fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft
fft_ihfft linalg_cond linalg_matrix_rank linalg_solve linalg_cholesky linalg_svdvals linalg_eigvals linalg_eigvalsh
linalg_inv linalg_householder_product linalg_tensorinv linalg_tensorsolve fake_quantize_per_tensor_affine geqrf
_lu_with_info qr svd triangular_solve fractional_max_pool2d fractional_max_pool3d adaptive_max_pool3d
multilabel_margin_loss_forward linalg_qr linalg_cholesky_ex linalg_svd linalg_eig linalg_eigh linalg_lstsq
linalg_inv_ex cat stack index_copy
""".split()


@pytest.mark.parametrize("name", sorted({*CUDA_PAGE, *CPU_PAGE}))
def test_every_name_of_pytorchs_page_resolves(name: str) -> None:
    ops = words.resolve(name)
    assert ops
    assert all(op in words.traits and "out" not in words.traits[op] for op in ops)


@pytest.mark.parametrize(
    ("written", "ops"),
    [
        ("softmin", {"aten::softmax.int"}),
        ("__matmul__", {"aten::matmul"}),
        ("__rpow__", {"aten::pow.Scalar"}),
        ("__rtruediv__", {"aten::reciprocal"}),
        ("GRUCell", {"aten::gru_cell"}),
        ("RNNCell", {"aten::rnn_tanh_cell", "aten::rnn_relu_cell"}),
        ("cross_entropy", {"aten::cross_entropy_loss"}),
        ("normalize", {"aten::linalg_vector_norm"}),
        ("linear", {"aten::linear"}),
        ("sum", {"aten::sum", "aten::sum.dim_IntList"}),
        ("sum.default", {"aten::sum"}),
        ("aten::sum.dim_IntList", {"aten::sum.dim_IntList"}),
        ("sum.out", {"aten::sum.out"}),
        ("F.softmax", {"aten::softmax.int"}),
        ("torch.nn.functional.gelu", {"aten::gelu"}),
        ("torch.linalg.solve", {"aten::linalg_solve"}),
        ("linalg.solve", {"aten::linalg_solve"}),
        ("fft.rfft", {"aten::fft_rfft"}),
        ("torch.fft.rfft", {"aten::fft_rfft"}),
        ("torch.special.log_softmax", {"aten::special_log_softmax"}),
        ("torch.ops.aten.mm.default", {"aten::mm"}),
        ("aten.bmm", {"aten::bmm", "aten::bmm.dtype"}),
        ("torch.bmm", {"aten::bmm", "aten::bmm.dtype"}),
        ("torch.Tensor.addmm", {"aten::addmm", "aten::addmm.dtype"}),
        ("nn.Linear", {"aten::linear"}),
        ("conv2d", {"aten::conv2d", "aten::conv2d.padding"}),
    ],
)
def test_spellings(written: str, ops: set[str]) -> None:
    assert set(words.resolve(written)) == ops


def test_the_aten_prefix_means_the_op_itself_and_no_python_name() -> None:
    assert "aten::linalg_vector_norm" in words.resolve("norm")
    assert "aten::linalg_vector_norm" not in words.resolve("aten::norm")


def test_custom_ops_are_taken_as_they_are() -> None:
    assert words.resolve("mylib::attention") == ("mylib::attention",)
    assert words.resolve("mylib::attention.default") == ("mylib::attention",)


def test_near_names_are_offered() -> None:
    with pytest.raises(UnknownOpError) as caught:
        words.resolve("sofmax")
    assert str(caught.value).startswith("'sofmax' is no op that this framework has. Did you mean 'softmax'")


def test_an_unknown_overload_lists_the_known_ones() -> None:
    with pytest.raises(UnknownOpError) as caught:
        words.resolve("sum.dim")
    assert str(caught.value) == (
        "'sum.dim' is no op: aten::sum has no such overload; it has sum, sum.IntList_out, sum.dim_IntList, sum.out."
    )


@pytest.mark.parametrize("written", ["", "torch.", "F.", "aten::", "aten::nothing", "softmax.", ".int"])
def test_what_is_no_name_raises(written: str) -> None:
    with pytest.raises(UnknownOpError):
        words.resolve(written)


def test_every_alias_names_ops_that_exist() -> None:
    for name in words.aliases:
        assert words.resolve(name), name
        for op in words.inside(name):
            assert op in words.traits
