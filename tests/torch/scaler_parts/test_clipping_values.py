"""Clipping the values of gradients of which some are still scaled, and gradients that PyTorch's functions do not take."""

from __future__ import annotations

import math

import pytest
import torch

from mezzo.torch.scaling.clipping import clip_norm_, clip_value_

from .clipped import FOREACH, equal, make, same_with_nan, sparse, torch_norm, torch_value

foreachs = pytest.mark.parametrize("foreach", FOREACH)
dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)


@foreachs
@dtypes
def test_values_without_a_scale_are_clipped_as_pytorch_does_to_the_bit(dtype, foreach):
    gradients = make(dtype)
    expected = torch_value(gradients, 0.3, foreach=foreach)
    clip_value_([], gradients, None, 0.3, foreach=foreach)
    assert equal(gradients, expected)


@foreachs
@dtypes
@pytest.mark.parametrize("scale", [4.0, 2.0**-10])
def test_scaled_values_are_clipped_where_they_would_be_without_the_scale(dtype, foreach, scale):
    true = make(dtype)
    expected = torch_value(true, 0.25, foreach=foreach)
    scaled, unscaled = [gradient * scale for gradient in true], [gradient.clone() for gradient in true]
    clip_value_(scaled, unscaled, torch.tensor(scale), 0.25, foreach=foreach)
    assert equal(unscaled, expected)
    # By a power of two nothing is rounded, but for float16 numbers below the smallest normal one.
    tolerance = 2.0**-15 if dtype == torch.float16 else 0.0
    torch.testing.assert_close([gradient / scale for gradient in scaled], expected, rtol=0, atol=tolerance)


def test_a_limit_beyond_the_dtype_clips_nothing():
    gradient = torch.tensor([6e4, -6e4], dtype=torch.float16)
    clip_value_([gradient], [], torch.tensor(2.0**16), 8.0)
    assert gradient.tolist() == [6e4, -6e4]
    assert gradient.dtype == torch.float16


@foreachs
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_left_alone_and_the_others_are_clipped(bad, foreach):
    broken, sound = torch.tensor([80.0, bad]), torch.tensor([80.0, 1.0])
    unscaled, fine = broken.clone(), sound.clone()
    clip_value_([broken, sound], [unscaled, fine], torch.tensor(8.0), 1.0, foreach=foreach)
    before = [torch.tensor([80.0, bad])]
    assert same_with_nan([broken], before)
    assert same_with_nan([unscaled], before)
    assert sound.tolist() == [8.0, 1.0]
    assert fine.tolist() == [1.0, 1.0]


def test_complex_values_are_refused_as_pytorch_refuses_them():
    gradient = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(NotImplementedError, match="clamp is not supported for complex types") as theirs:
        torch_value([gradient], 0.5)
    with pytest.raises(NotImplementedError, match="clamp is not supported for complex types") as ours:
        clip_value_([gradient], [], torch.tensor(2.0), 0.5)
    assert str(ours.value).startswith(str(theirs.value))


# What PyTorch's functions do not take


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_sparse_gradients_have_the_norm_and_the_values_of_dense_ones(dtype):
    scaled, unscaled = sparse(dtype), sparse(dtype)
    dense = [(scaled.to_dense() / 4).double(), unscaled.to_dense().double()]
    norm, expected = torch_norm(dense, 1.0)
    torch.testing.assert_close(
        clip_norm_([scaled], [unscaled], torch.tensor(4.0), 1.0).double(), norm, rtol=1e-6, atol=0
    )
    ours = [scaled.to_dense().double() / 4, unscaled.to_dense().double()]
    torch.testing.assert_close(ours, expected, rtol=4e-3 if dtype == torch.float16 else 4e-6, atol=0)

    scaled, unscaled = sparse(dtype), sparse(dtype)
    clip_value_([scaled], [unscaled], torch.tensor(4.0), 1.5)
    assert scaled.to_dense().tolist() == [6.0, 0.0, 4.0, 0.0, 0.0, 0.5]
    assert unscaled.to_dense().tolist() == [1.5, 0.0, 1.5, 0.0, 0.0, 0.5]


def test_foreach_is_refused_where_a_device_has_none():
    gradient = torch.ones(2, device="meta")
    for refused in (
        lambda: torch_norm([gradient], 1.0, foreach=True),
        lambda: clip_norm_([], [gradient], None, 1.0, foreach=True),
        lambda: clip_value_([], [gradient], None, 1.0, foreach=True),
    ):
        with pytest.raises(
            RuntimeError, match="foreach=True was passed, but can't use the foreach API on meta tensors"
        ):
            refused()
