"""What the tests of compiled code rely on."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _fresh_tokens(request: pytest.FixtureRequest) -> None:
    """Give a module that compiles all tokens: the suite uses more policies than code can be compiled under."""
    if "compil" in request.module.__name__ or "export" in request.module.__name__:
        from mezzo.torch.tokens import start_over

        torch.compiler.reset()
        start_over()
