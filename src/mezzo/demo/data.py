"""The digits that scikit-learn ships: 1,797 real handwritten digits of 8 x 8 pixels, no download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

CLASSES = 10
SIDE = 8
TEST_SHARE = 0.25


@dataclass(frozen=True, eq=False)
class Split:
    """One part of the data.

    Args:
        images: float32, shape (samples, 1, 8, 8), standardised with the training part's mean and deviation.
        labels: int64, shape (samples,).
        indices: Where each sample stands in scikit-learn's order.
    """

    images: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        """Where the images and labels are."""
        return self.labels.device

    def to(self, device: torch.device) -> Split:
        """The same samples with images and labels on `device`."""
        return Split(self.images.to(device), self.labels.to(device), self.indices)

    def select(self, chosen: torch.Tensor) -> Split:
        """The samples at the positions `chosen` (int64, on the CPU)."""
        there = chosen.to(self.device)
        return Split(self.images[there], self.labels[there], self.indices[chosen])


@dataclass(frozen=True, eq=False)
class Digits:
    """Training and test part, without a common sample."""

    train: Split
    test: Split

    def to(self, device: torch.device) -> Digits:
        """The same data on `device`."""
        return Digits(self.train.to(device), self.test.to(device))


def load_split(seed: int = 0, limit: int | None = None) -> Digits:
    """Load the digits and split them so that every digit has the same share in both parts.

    Args:
        seed: Decides which samples form the test part; the global random state is left alone.
        limit: Use a stratified selection of that many samples instead of all 1,797.

    Returns:
        Three quarters of the samples to train on and one quarter to test on, on the CPU.

    Example:
        >>> digits = load_split()
        >>> len(digits.train), len(digits.test)
        (1347, 450)
    """
    raw = load_digits()
    pixels = np.asarray(raw.images, dtype=np.float32)
    labels = np.asarray(raw.target, dtype=np.int64)
    indices = np.arange(len(labels))
    if limit is not None and limit < len(labels):
        indices, _ = train_test_split(indices, train_size=limit, stratify=labels[indices], random_state=seed)
    train, test = train_test_split(indices, test_size=TEST_SHARE, stratify=labels[indices], random_state=seed)
    # The test part must not leak into the numbers that the training part is scaled with.
    mean, deviation = pixels[train].mean(), pixels[train].std()

    def part(chosen: np.ndarray) -> Split:
        scaled = (pixels[chosen] - mean) / deviation
        return Split(
            images=torch.from_numpy(scaled).unsqueeze(1),
            labels=torch.from_numpy(labels[chosen]),
            indices=torch.from_numpy(chosen),
        )

    return Digits(part(train), part(test))
