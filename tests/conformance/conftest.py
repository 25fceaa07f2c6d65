"""The backends that the conformance tests run on, the dtypes of their regions, and what they cannot meet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .backends import BACKENDS
from .unmet import UNMET

if TYPE_CHECKING:
    from .backend import Backend

# These concern no backend, and importing PyTorch is most of what they take.
collect_ignore = ["test_scaling_of_pytorch.py"] if os.environ.get("MEZZO_CONFORMANCE") else []


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


@pytest.fixture(params=["bfloat16", "float16"])
def low(request: pytest.FixtureRequest, backend: Backend) -> str:
    """Give a dtype for a region to compute in."""
    if request.param not in backend.low_dtypes:
        pytest.skip(f"{backend.name} cannot compute in {request.param} here")
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if not (isinstance(item, pytest.Function) and item.path.is_relative_to(here) and hasattr(item, "callspec")):
            continue
        if "backend" in item.callspec.params:
            for unmet in UNMET:
                if unmet.covers(item.originalname, item.callspec.params):
                    item.add_marker(pytest.mark.xfail(reason=unmet.cause, raises=unmet.raises, strict=True))
