"""The live-storage count against cases worked out by hand; a float32 number has four bytes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from mezzo.demo.memory import ATTEMPTS, LiveStorages, step_peak_bytes

KIBI = 1024


def kibibyte() -> torch.Tensor:
    return torch.zeros(256)


def test_three_tensors_and_one_freed():
    """Freeing lowers what is live and leaves the peak."""
    with LiveStorages() as storages:
        first, second, third = kibibyte(), kibibyte(), kibibyte()
        assert storages.live_bytes == 3 * KIBI
        del second
        assert storages.live_bytes == 2 * KIBI
        fourth = kibibyte()
    assert storages.live_bytes == 3 * KIBI
    assert storages.peak_bytes == 3 * KIBI
    assert first.numel() + third.numel() + fourth.numel() == 3 * 256


def test_freed_memory_is_noticed_after_the_mode_ended():
    """A storage's end is seen wherever it happens."""
    with LiveStorages() as storages:
        tensor = kibibyte()
    del tensor
    assert storages.live_bytes == 0


def test_views_share_one_storage():
    """Views and expansions cost nothing, and keep their base alive."""
    with LiveStorages() as storages:
        base = kibibyte()
        view = base.view(16, 16)[3:].t()
        wide = base.expand(64, 256)
        assert storages.live_bytes == KIBI
        del base, wide
        assert storages.live_bytes == KIBI
        del view
        assert storages.live_bytes == 0


def test_in_place_operators_allocate_nothing():
    with LiveStorages() as storages:
        tensor = kibibyte()
        tensor.add_(1).mul_(2)
        tensor[3:5].zero_()
    assert storages.peak_bytes == KIBI


def test_temporary_results_count_while_they_live():
    """`(a + 1) * 2` needs a, the sum and the product at one moment, then a and the product."""
    with LiveStorages() as storages:
        tensor = kibibyte()
        tensor = (tensor + 1) * 2
        assert storages.peak_bytes == 3 * KIBI
        assert storages.live_bytes == KIBI


def test_half_width_numbers_take_half():
    with LiveStorages() as storages:
        wide = kibibyte()
        narrow = wide.to(torch.bfloat16)
    assert storages.peak_bytes == KIBI + KIBI // 2
    assert narrow.dtype == torch.bfloat16


def test_a_small_view_of_an_older_tensor_counts_whole():
    """What stays in memory is the storage, not the part that is looked at."""
    older = kibibyte()
    with LiveStorages() as storages:
        storages.track([older[:2], older[7:], "not a tensor"])
        assert storages.live_bytes == KIBI
    assert storages.peak_bytes == KIBI


def test_a_resized_tensor_counts_with_its_new_size():
    with LiveStorages() as storages:
        tensor = kibibyte()
        tensor.resize_(512)
        assert storages.live_bytes == 2 * KIBI
        del tensor
        assert storages.live_bytes == 0


def test_many_tensors_that_reuse_addresses_leave_no_trace():
    """Object identities are reused by Python; each must be forgotten before that."""
    with LiveStorages() as storages:
        for _ in range(200):
            kibibyte().add(1)
        assert storages.live_bytes == 0
    assert storages.peak_bytes == 2 * KIBI


class LinearStep:
    """x (4, 8) times w (16, 8) transposed, summed: small enough to count by hand."""

    def __init__(self) -> None:
        self.inputs = torch.ones(4, 8)
        self.weight = torch.ones(16, 8, requires_grad=True)

    def __call__(self) -> None:
        self.weight.grad = None
        functional.linear(self.inputs, self.weight).sum().backward()

    def stepped(self) -> bool:
        return True

    def tensors(self) -> list[torch.Tensor]:
        return [self.inputs, self.weight]


def test_a_training_step_against_the_sum_by_hand():
    """The peak is in backward: input, weight, its gradient, the loss and the loss's gradient.

    The sum keeps only the shape of what it adds up, so the (4, 16) result is gone by then.
    """
    inputs, weight, gradient, loss, loss_gradient = 4 * 8, 16 * 8, 16 * 8, 1, 1
    expected = 4 * (inputs + weight + gradient + loss + loss_gradient)
    assert step_peak_bytes(LinearStep, torch.device("cpu")) == expected


class SkippingStep(LinearStep):
    """Skips some calls before each that it makes, as under a gradient scaler; a made one has state of 1 KiB."""

    def __init__(self, skips: list[int]) -> None:
        super().__init__()
        self.skips = skips
        self.made = False
        self.state: torch.Tensor | None = None

    def __call__(self) -> None:
        super().__call__()
        self.made = self.skips[0] == 0
        if self.made:
            self.skips.pop(0)
            self.state = torch.zeros(256) if self.state is None else self.state
            self.state.add_(kibibyte())
        else:
            self.skips[0] -= 1

    def stepped(self) -> bool:
        return self.made

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), *([] if self.state is None else [self.state])]


def test_skipped_steps_are_repeated_until_one_is_made():
    """The optimizer's state, 1 KiB, and what the update takes, 1 KiB, count whichever calls were skipped.

    They come on top of input, weight and gradient; the loss and its gradient are gone when the update runs.
    """
    never = step_peak_bytes(lambda: SkippingStep([0, 0]), torch.device("cpu"))
    assert never == 4 * (4 * 8 + 2 * 16 * 8) + 2 * KIBI
    for skips in ([2, 0], [0, 2], [3, 1]):
        assert step_peak_bytes(lambda skips=skips: SkippingStep(skips), torch.device("cpu")) == never


def test_a_step_that_is_always_skipped_is_given_up():
    with pytest.raises(RuntimeError, match=f"gradients of {ATTEMPTS} steps in a row were not finite"):
        step_peak_bytes(lambda: SkippingStep([ATTEMPTS]), torch.device("cpu"))
