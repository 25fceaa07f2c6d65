"""What the tests of compiled code rely on, and the garbage collections that many tests ask for made short."""

from __future__ import annotations

import gc

import pytest
import torch


def pytest_collection_finish() -> None:
    """Have the garbage collector look only at what the tests make.

    What is there by now are modules, PyTorch's op database among them: over a million objects, none of which a test
    could free. A collection walks them all, which takes a second, and each `torch.compiler.reset` is one.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _fresh_tokens(request: pytest.FixtureRequest) -> None:
    """Give a module that compiles all tokens: the suite uses more policies than code can be compiled under."""
    if "compil" in request.module.__name__ or "export" in request.module.__name__:
        from mezzo.torch.tokens import start_over

        torch.compiler.reset()
        start_over()
