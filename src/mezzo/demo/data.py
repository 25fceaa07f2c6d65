"""The digits of `mezzo.demo.arrays` as PyTorch tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mezzo.demo.arrays import load_arrays

if TYPE_CHECKING:
    from mezzo.demo.arrays import ArrayPart


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
    return as_tensors(*load_arrays(seed, limit))


def as_tensors(train: ArrayPart, test: ArrayPart) -> Digits:
    """Give both parts as tensors on the CPU, which share the arrays' memory."""
    return Digits(_tensors(train), _tensors(test))


def _tensors(part: ArrayPart) -> Split:
    return Split(
        images=torch.from_numpy(part.images).unsqueeze(1),
        labels=torch.from_numpy(part.labels),
        indices=torch.from_numpy(part.indices),
    )
