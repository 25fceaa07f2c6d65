"""Selectors: how a caller names parameters and buffers of a model by pattern, by module class or by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from mezzo.errors import PreparationError, near
from mezzo.torch import module_names
from mezzo.torch.module_names import Found, named_modules

__all__ = ["Entry", "Selector", "buffer_entries", "described", "parameter_entries", "parse_selectors", "select"]

Selector = str | type[nn.Module] | Callable[[str, nn.Module, Tensor], bool]
"""A glob pattern over names of parameters and modules, a module class, or a predicate."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter or buffer under one of its names.

    Attributes:
        name: The full name, without the parts that wrappers add.
        module: The module that owns it.
        attribute: Its name there.
        tensor: The parameter or buffer.
        path: The module's name.
        parent: The module that holds the module; None for the model itself.
        holder: Whose own it is for a selector by class: the module, or the one whose parametrization it is part of.
    """

    name: str
    module: nn.Module
    attribute: str
    tensor: Tensor
    path: str
    parent: nn.Module | None
    holder: nn.Module


def parameter_entries(model: nn.Module) -> list[Entry]:
    """Give the parameters of a model, a shared one under each of its names.

    Args:
        model: The model; wrappers are looked through as in `mezzo.torch.set_precision`.

    Returns:
        The parameters in the order of the modules.

    Raises:
        PreparationError: A parameter has no shape yet.
    """
    return _entries(model, lambda module: module._parameters.items())


def buffer_entries(model: nn.Module) -> list[Entry]:
    """Give the floating-point buffers of a model, as `parameter_entries` does its parameters."""
    entries = _entries(model, lambda module: module._buffers.items())
    return [entry for entry in entries if entry.tensor.is_floating_point()]


def _entries(model: nn.Module, tensors_of: Callable[[nn.Module], Iterable[tuple[str, Tensor | None]]]) -> list[Entry]:
    modules = named_modules(model)
    by_name = {found.name: found.module for found in modules}
    entries: list[Entry] = []
    for found in modules:
        parent = by_name[found.name.rpartition(".")[0]] if found.name else None
        holder = found.module
        if isinstance(holder, ParametrizationList):  # its name is "<holder>.parametrizations.<attribute>"
            holder = by_name[".".join(found.name.split(".")[:-2])]
        for attribute, tensor in tensors_of(found.module):
            if tensor is None:
                continue
            name = f"{found.name}.{attribute}" if found.name else attribute
            if is_lazy(tensor):
                msg = (
                    f"{name!r} of {type(found.module).__name__} has no shape before the model has run. "
                    "Run one forward with a batch first, then prepare the model."
                )
                raise PreparationError(msg)
            entries.append(Entry(name, found.module, attribute, tensor, found.name, parent, holder))
    return entries


def parse_selectors(which: str, value: object) -> list[Selector]:
    """Check what a caller gave as selectors.

    Args:
        which: The argument, ``"low"`` or ``"keep"``, for messages.
        value: A selector, or a sequence or set of them.

    Returns:
        The selectors.

    Raises:
        PreparationError: Something among them is no selector.

    Example:
        >>> parse_selectors("keep", "head.*")
        ['head.*']
    """
    is_many = isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes)
    given: list[Any] = list(value) if is_many else [value]  # type: ignore[call-overload]  # it is checked
    for selector in given:
        _check(which, selector)
    return given


def _check(which: str, selector: object) -> None:
    if isinstance(selector, str) or (isinstance(selector, type) and issubclass(selector, nn.Module)):
        return
    if callable(selector) and not isinstance(selector, type | nn.Module):
        return
    hint = ""
    if isinstance(selector, nn.Module):
        hint = f" Give the module's name or its class, {type(selector).__name__}."
    elif isinstance(selector, Tensor):
        hint = " Give the parameter's name."
    shown = f"class {selector.__name__}" if isinstance(selector, type) else f"a {type(selector).__name__}"
    msg = (
        f"{which}= takes a glob pattern over names of parameters or modules, a torch.nn.Module class, a function "
        f"f(name, module, parameter) -> bool, or a sequence of these; got {shown}.{hint}"
    )
    raise PreparationError(msg)


def select(
    which: str,
    selectors: list[Selector],
    model: nn.Module,
    entries: list[Entry],
    others: Callable[[nn.Module], list[Entry]],
) -> dict[int, Selector]:
    """Find the tensors that selectors name.

    Args:
        which: The argument that they came as, for messages.
        selectors: The selectors.
        model: The model.
        entries: Parameters or buffers. One that has several names is selected by any of them.
        others: Gives the model's entries that a selector may name instead, asked for if it names none of ``entries``.

    Returns:
        By the tensor's id the first selector that names it.

    Raises:
        PreparationError: A selector names nothing; near names are offered.
    """
    modules = named_modules(model) if any(isinstance(selector, str) for selector in selectors) else []
    chosen: dict[int, Selector] = {}
    for selector in selectors:
        matched = _named_by(selector, modules, entries)
        if not matched and not _named_by(selector, modules, others(model)):
            raise PreparationError(_nothing(which, selector, modules, [*entries, *others(model)]))
        for entry in matched:
            chosen.setdefault(id(entry.tensor), selector)
    return chosen


def described(selector: Selector) -> str:
    """Give a selector as a message shows it."""
    if isinstance(selector, str):
        return repr(selector)
    name = getattr(selector, "__qualname__", None) or type(selector).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _named_by(selector: Selector, modules: list[Found], entries: list[Entry]) -> list[Entry]:
    if isinstance(selector, str):
        paths = _matching(selector, [found.name for found in modules])
        names = _matching(selector, [entry.name for entry in entries])
        return [entry for entry in entries if entry.name in names or not paths.isdisjoint(_upwards(entry.path))]
    if isinstance(selector, type):
        return [entry for entry in entries if isinstance(entry.holder, selector)]
    return [entry for entry in entries if selector(entry.name, entry.module, entry.tensor)]


def _upwards(path: str) -> list[str]:
    """Name a module and all those around it."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def _matching(pattern: str, names: list[str]) -> set[str]:
    """Match names as `mezzo.torch.set_precision` does."""
    parts = module_names._parts(pattern)
    return {name for name in names if module_names._matches(parts, module_names._parts(name))}


def _nothing(which: str, selector: Selector, modules: list[Found], entries: list[Entry]) -> str:
    """Say that a selector names nothing, and what it could name."""
    if isinstance(selector, str):
        if _matching(selector, [found.name for found in modules]):
            return f"{which}={selector!r} names modules that have no parameters, and none below them."
        names = [entry.name for entry in entries]
        shown = ", ".join(repr(name) for name in names[:6]) + (" and so on" if len(names) > 6 else "")
        hint = near(selector, dict.fromkeys([*names, *(found.name for found in modules if found.name)]))
        hint = hint or f" Its parameters and buffers are {shown}; '*' is one part of a name, '**' any number of parts."
        return f"{which}={selector!r} names no parameter, floating-point buffer or module of this model.{hint}"
    if isinstance(selector, type):
        classes = list(dict.fromkeys(type(entry.holder).__name__ for entry in entries))
        hint = near(selector.__name__, classes) or f" Those that have some are {', '.join(classes)}."
        return f"{which}={selector.__name__}: no module of this class here has parameters of its own.{hint}"
    return f"{which}={described(selector)} is true for no parameter of this model."
