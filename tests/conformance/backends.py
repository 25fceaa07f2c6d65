"""The frameworks that are installed, as backends of the conformance tests.

TensorPlay can kill the interpreter, so its run is one of its own: MEZZO_CONFORMANCE=tensorplay. It is among the tests that
tests/test_tensorplay_folders.py starts.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import Backend

__all__ = ["BACKENDS"]


def chosen() -> list[Backend]:
    """Make the backends of this run; what the environment asks for is one of those below or an error."""
    asked = os.environ.get("MEZZO_CONFORMANCE", "")
    if asked not in {"", "tensorplay"}:
        msg = f"MEZZO_CONFORMANCE is {asked!r}; it may be 'tensorplay', or left out for PyTorch and JAX"
        raise ValueError(msg)
    return [tensorplay()] if asked else installed()


def tensorplay() -> Backend:
    """Make the backend of TensorPlay."""
    from .tensorplay_backend import TensorPlayBackend

    return TensorPlayBackend()


def installed() -> list[Backend]:
    """Make a backend of each other framework that is installed: mezzo needs none of them."""
    found: list[Backend] = []
    if find_spec("torch"):
        from .torch_backend import TorchBackend

        found.append(TorchBackend())
    if find_spec("jax"):
        from .jax_backend import JaxBackend

        found.append(JaxBackend())
    return found


BACKENDS = chosen()
