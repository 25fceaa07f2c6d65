"""The garbage collections that many tests ask for made short."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Have the garbage collector look only at what the tests make.

    What is there by now are modules, PyTorch's op database among them: over a million objects, none of which a test
    could free. A collection walks them all, which takes a second, and each `torch.compiler.reset` is one.
    """
    gc.collect()
    gc.freeze()
