"""Where the demo runs, and how to read a clock there."""

from __future__ import annotations

import platform
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def pick_device(requested: str | None = None) -> torch.device:
    """Decide where to train: as asked, else on CUDA, else on another accelerator, else on the CPU.

    Raises:
        ValueError: If the requested device does not exist here or knows no autocast.
    """
    if requested is None:
        return _best_device()
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        message = f"Device {requested!r} is not one that PyTorch knows; expected a name like 'cpu' or 'cuda:0'."
        raise ValueError(message) from error
    if not torch.amp.is_autocast_available(device.type):
        message = f"Device {requested!r} has no autocast; leave the device out to have one chosen."
        raise ValueError(message)
    if device.type != "cpu" and not _is_present(device):
        message = f"Device {requested!r} is not present here; use 'cpu' or leave the device out."
        raise ValueError(message)
    return device


def _best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and torch.amp.is_autocast_available(accelerator.type):
        return accelerator
    return torch.device("cpu")


def _is_present(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        return False
    return (device.index or 0) < torch.accelerator.device_count()


def describe(device: torch.device) -> str:
    """A name for people: the GPU's, or the processor's architecture and the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{platform.machine()} CPU, {threads} thread{'' if threads == 1 else 's'}"
    return str(device)


def clock(device: torch.device) -> float:
    """Seconds on a monotonic clock, read once everything queued on the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def single_threaded() -> Iterator[None]:
    """Let PyTorch's CPU operators use one thread until the end of the region.

    The nets are small. A second thread gains little on idle cores, while on cores that are shared with other
    programs, or with a container's quota, each operator waits for the slowest thread: ten times slower,
    measured. One thread also gives the same losses whatever the number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
