"""The facts about the data that the demo's numbers rest on."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits

from mezzo.demo.arrays import TEST_SHARE
from mezzo.demo.data import load_split


@pytest.fixture(scope="module")
def digits():
    return load_split(seed=0)


def test_every_sample_is_in_exactly_one_part(digits):
    """All 1,797 digits, none twice."""
    together = torch.cat([digits.train.indices, digits.test.indices])
    assert len(digits.train) + len(digits.test) == 1797
    assert torch.equal(together.sort().values, torch.arange(1797))


def test_each_digit_has_its_share_of_the_test_part(digits):
    """Stratified: at most one sample away from a quarter, for each of the ten digits."""
    total = torch.bincount(torch.cat([digits.train.labels, digits.test.labels]), minlength=10)
    tested = torch.bincount(digits.test.labels, minlength=10)
    assert len(total) == 10
    assert (tested - TEST_SHARE * total).abs().max() <= 1


def test_shapes_and_dtypes(digits):
    assert digits.train.images.shape == (1347, 1, 8, 8)
    assert digits.train.images.dtype == torch.float32
    assert digits.test.labels.dtype == torch.int64


def test_standardised_with_the_training_part(digits):
    """Mean 0 and deviation 1 there, to float32 accuracy; the test part is near, not equal."""
    assert abs(digits.train.images.mean().item()) < 1e-5
    assert abs(digits.train.images.std(correction=0).item() - 1) < 1e-5
    assert 1e-5 < abs(digits.test.images.mean().item()) < 0.05


def test_images_and_labels_stay_together(digits):
    """Each sample is scikit-learn's up to one affine map, and has its label."""
    raw = load_digits()
    pixels = torch.tensor(raw.images, dtype=torch.float32)[digits.test.indices]
    blank, full = digits.test.images.min(), digits.test.images.max()
    restored = (digits.test.images.squeeze(1) - blank) / (full - blank) * 16
    torch.testing.assert_close(restored, pixels, atol=1e-4, rtol=0)
    assert digits.test.labels.tolist() == raw.target[digits.test.indices].tolist()


def test_the_seed_decides_the_split(digits):
    assert torch.equal(load_split(seed=0).test.indices, digits.test.indices)
    assert not torch.equal(load_split(seed=1).test.indices, digits.test.indices)


def test_a_limit_keeps_all_digits():
    """A small selection is stratified too: 200 samples hold 20 of each digit, give or take one."""
    small = load_split(seed=0, limit=200)
    counts = torch.bincount(torch.cat([small.train.labels, small.test.labels]), minlength=10)
    assert counts.sum() == 200
    assert (counts - 20).abs().max() <= 1


def test_select_takes_samples_by_position(digits):
    chosen = digits.train.select(torch.tensor([5, 2]))
    assert torch.equal(chosen.images[1], digits.train.images[2])
    assert chosen.labels.tolist() == [digits.train.labels[5], digits.train.labels[2]]
    assert chosen.indices.tolist() == [digits.train.indices[5], digits.train.indices[2]]
