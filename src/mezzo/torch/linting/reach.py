"""Which functions a module's methods call by name, so that a helper beside the class is looked at too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeGuard

__all__ = ["functions_called", "globals_of", "is_ours"]

_OWN = ("torch.", "mezzo.")


def is_ours(module: str | None) -> bool:
    """Say whether a module of this name belongs to PyTorch or mezzo, whose code is not looked at.

    Example:
        >>> is_ours("torch.nn.functional"), is_ours("torchvision.ops"), is_ours(None)
        (True, False, False)
    """
    return f"{module}.".startswith(_OWN)


def globals_of(code: object) -> dict[str, Any]:
    """Give the global names that the code of a class, a function or a module sees; none if they are not known.

    Example:
        >>> "is_ours" in globals_of(is_ours)
        True
    """
    if isinstance(code, ModuleType):
        return vars(code)
    if isinstance(code, FunctionType):
        return code.__globals__
    module = sys.modules.get(getattr(code, "__module__", None) or "")
    return vars(module) if module is not None else {}


def functions_called(kind: type) -> list[FunctionType]:
    """List the functions that the methods of a class name, and those that these name in turn.

    Only names of the global scope are followed, and attributes of modules in it; what is called through an object or an
    argument is not seen. Functions of Python's own, of PyTorch's and of mezzo's are left out.

    Args:
        kind: The class, without its bases.

    Returns:
        Each function once.

    Example:
        >>> class Widths:
        ...     def widest(self, kind):
        ...         return functions_called(kind)
        >>> functions_called(Widths)
        []
    """
    waiting = [method for method in vars(kind).values() if isinstance(method, FunctionType)]
    found: dict[int, FunctionType] = {}
    while waiting:
        for function in _named_in(waiting.pop()):
            if id(function) not in found:
                found[id(function)] = function
                waiting.append(function)
    return list(found.values())


def _named_in(function: FunctionType) -> Iterator[FunctionType]:
    names = set(_names(function.__code__))
    scope = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for value in scope.values():
        if isinstance(value, ModuleType) and not is_ours(value.__name__):
            yield from (one for name in names if _is_function(one := vars(value).get(name)))
        elif _is_function(value):
            yield value


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _names(part)


def _is_function(value: Any) -> TypeGuard[FunctionType]:
    return isinstance(value, FunctionType) and not is_ours(value.__module__)
