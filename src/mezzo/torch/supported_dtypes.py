"""The function by which PyTorch asks a backend for the dtypes that its autocast knows: ``get_amp_supported_dtype``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mezzo.errors import DtypeError, RegistrationError

__all__ = ["supplied"]

_FUNCTION = "get_amp_supported_dtype"
_MISSING = object()


class _Supported:
    """The function that mezzo puts on a module that has none.

    Attributes:
        dtypes: What it gives.
    """

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        self.dtypes = dtypes

    def __call__(self) -> list[torch.dtype]:
        """Give the dtypes."""
        return list(self.dtypes)


@contextmanager
def supplied(name: str, dtypes: tuple[torch.dtype, ...]) -> Iterator[None]:
    """Have the function on a backend's module, and take it back if the block raises.

    Args:
        name: The backend.
        dtypes: What the function is to say.

    Raises:
        RegistrationError: There is no module ``torch.<name>``, nothing can be put on it, or its own function is none.
        DtypeError: The backend's own function says something else.
    """
    module = getattr(torch, name, None)
    if module is None:
        msg = (
            f"there is no torch.{name}, where PyTorch looks for the backend's functions. Register its module first: "
            f"torch._register_device_module({name!r}, module)."
        )
        raise RegistrationError(msg)
    own = getattr(module, _FUNCTION, _MISSING)
    if own is _MISSING:
        _put_on(name, module, _Supported(dtypes))
    elif isinstance(own, _Supported):
        before, own.dtypes = own.dtypes, dtypes
    else:
        _compare(name, own, dtypes)
    try:
        yield
    except BaseException:
        if own is _MISSING:
            delattr(module, _FUNCTION)
        elif isinstance(own, _Supported):
            own.dtypes = before
        raise


def _put_on(name: str, module: Any, function: _Supported) -> None:
    try:
        setattr(module, _FUNCTION, function)
    except (AttributeError, TypeError) as error:
        msg = (
            f"torch.{name} has no {_FUNCTION}() and takes none ({error}). Define it there: it returns the list of dtypes "
            "that regions may compute in."
        )
        raise RegistrationError(msg) from None


def _compare(name: str, own: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    if not callable(own):
        msg = f"torch.{name}.{_FUNCTION} must be a function that returns a list of dtypes, and is {own!r}."
        raise RegistrationError(msg)
    returned = own()
    said = list(returned) if isinstance(returned, Iterable) else [None]
    if not all(isinstance(dtype, torch.dtype) for dtype in said):
        msg = f"torch.{name}.{_FUNCTION}() must return a list of dtypes, as PyTorch's guide says; it returned {returned!r}."
        raise RegistrationError(msg)
    if set(said) != set(dtypes):
        msg = (
            f"torch.{name}.{_FUNCTION}() says {', '.join(map(str, said))}, and dtypes says {', '.join(map(str, dtypes))}. "
            "The backend's own function counts; pass the same dtypes."
        )
        raise DtypeError(msg)
