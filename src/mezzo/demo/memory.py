"""Peak memory of a training step: CUDA's own count, or on other devices a count of live storages."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ATTEMPTS = 64
"""A scale that halves at every skip falls from 2**16 to below any float16 number's inverse in fewer steps."""


class LiveStorages(TorchDispatchMode):  # PyTorch's
    """While active, knows how many bytes of tensor storage are alive, and how many were at most.

    A storage counts once however many views it has, with its full size, from the first operator that takes or
    returns it until it is freed. Scratch memory that an operator takes and frees inside itself is not
    seen. Tensors made before the mode was entered count from `track` on, or else from their first use.

    Example:
        >>> with LiveStorages() as storages:
        ...     a = torch.zeros(256)
        ...     b = a.view(16, 16)
        >>> storages.peak_bytes
        1024
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        # PyTorch keeps one Python object per storage for as long as the storage lives, so its id is a key.
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and count the storages of its inputs and outputs."""
        keywords = kwargs or {}
        self.track(tree_leaves((args, keywords)))
        result = func(*args, **keywords)
        # The inputs once more: `resize_` and `set_` change the storage of an argument.
        self.track(tree_leaves((args, keywords, result)))
        return result

    def track(self, values: Iterable[object]) -> None:
        """Count the storages of the tensors among `values` from now on."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key).atexit = False
        self.live_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)


class Step(Protocol):
    """A training step that can be repeated."""

    def __call__(self) -> object:
        """Run the step: forward, loss, backward, optimizer."""

    def stepped(self) -> bool:
        """Whether the last call changed the weights: a gradient scaler skips the optimizer after an overflow."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """What lives between steps: weights, gradients, optimizer state, the batch."""


def step_peak_bytes(make_step: Callable[[], Step], device: torch.device) -> int:
    """Most bytes alive at one moment of a training step: weights, gradients, activations, optimizer state.

    Args:
        make_step: Builds the step and everything it owns. It must share no tensor with the rest of the
            program, because on CUDA what is allocated before this call is subtracted.
        device: Where the step runs.

    Returns:
        Bytes, of a step that was made: those that a gradient scaler skips are repeated.

    Raises:
        RuntimeError: If 64 steps in a row are skipped.
    """
    gc.collect()
    before: int = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    step = make_step()
    _make(step)  # the first step creates the optimizer's state; the second is like all that follow
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        _make(step)
        return int(torch.cuda.max_memory_allocated(device)) - before
    storages = LiveStorages()
    with storages:
        storages.track(step.tensors())
        _make(step)
    return storages.peak_bytes


def _make(step: Step) -> None:
    # A skipped step leaves the optimizer out, and at first its state too: it would count too little.
    for _ in range(ATTEMPTS):
        step()
        if step.stepped():
            return
    message = f"The gradients of {ATTEMPTS} steps in a row were not finite, so that no step's memory could be measured."
    raise RuntimeError(message)
