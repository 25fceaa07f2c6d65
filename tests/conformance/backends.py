"""The frameworks that are installed, as backends of the conformance tests."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import Backend

__all__ = ["BACKENDS"]


def installed() -> list[Backend]:
    """Make a backend of each framework that is installed: mezzo needs none of them."""
    found: list[Backend] = []
    if find_spec("torch"):
        from .torch_backend import TorchBackend

        found.append(TorchBackend())
    if find_spec("jax"):
        from .jax_backend import JaxBackend

        found.append(JaxBackend())
    return found


BACKENDS = installed()
