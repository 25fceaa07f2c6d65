"""The digits that scikit-learn ships, split, as NumPy arrays: 1,797 real handwritten digits of 8 x 8 pixels, no download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLASSES = 10
SIDE = 8
TEST_SHARE = 0.25


@dataclass(frozen=True, eq=False)
class ArrayPart:
    """One part of the data.

    Args:
        images: float32, shape (samples, 8, 8), standardised with the training part's mean and deviation.
        labels: int64, shape (samples,).
        indices: int64, shape (samples,): where each sample stands in scikit-learn's order.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


def load_arrays(seed: int = 0, limit: int | None = None) -> tuple[ArrayPart, ArrayPart]:
    """Load the digits and split them so that every digit has the same share in both parts.

    Args:
        seed: Decides which samples form the test part; the global random state is left alone.
        limit: Use a stratified selection of that many samples instead of all 1,797.

    Returns:
        Three quarters of the samples to train on, and one quarter to test on: the same for every framework.

    Example:
        >>> [len(part) for part in load_arrays()]
        [1347, 450]
    """
    raw = load_digits()
    pixels = np.asarray(raw.images, dtype=np.float32)
    labels = np.asarray(raw.target, dtype=np.int64)
    indices: Any = np.arange(len(labels))
    if limit is not None and limit < len(labels):
        indices, _ = train_test_split(indices, train_size=limit, stratify=labels[indices], random_state=seed)
    train, test = train_test_split(indices, test_size=TEST_SHARE, stratify=labels[indices], random_state=seed)
    # The test part must not leak into the numbers that the training part is scaled with.
    mean, deviation = pixels[train].mean(), pixels[train].std()
    part, other = (ArrayPart((pixels[rows] - mean) / deviation, labels[rows], rows) for rows in (train, test))
    return part, other
