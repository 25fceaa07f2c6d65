"""The backends that the conformance tests run on, and the dtypes of their regions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .torch_backend import TorchBackend

if TYPE_CHECKING:
    from .backend import Backend

BACKENDS: list[Backend] = [TorchBackend()]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


@pytest.fixture(params=["bfloat16", "float16"])
def low(request: pytest.FixtureRequest, backend: Backend) -> str:
    """Give a dtype for a region to compute in."""
    if request.param not in backend.low_dtypes:
        pytest.skip(f"{backend.name} cannot compute in {request.param} here")
    return request.param
