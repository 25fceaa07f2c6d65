"""Which modules a glob pattern names, and which of those a precision can be set on.

A pattern is compared with a module's dotted name part by part: ``*`` stands for anything within one part, ``**`` for any
number of parts, none included. ``""`` is the model itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mezzo.errors import MezzoError, near

__all__ = ["Found", "UnknownModuleError", "find_modules", "inner_of", "named_modules"]


class UnknownModuleError(MezzoError, LookupError):
    """A pattern names no module of the model, or only modules whose forward is never called."""


@dataclass(frozen=True)
class Found:
    """A module under one of its names.

    Attributes:
        name: The dotted name, without the parts that wrappers add; ``""`` for the model itself.
        module: The module.
        idle: Why its forward is never called; empty if it is, as far as can be known.
    """

    name: str
    module: nn.Module
    idle: str


_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Under these names torch.compile, FSDP and activation checkpointing hold the module that they wrap."""


def named_modules(model: nn.Module) -> list[Found]:
    """Give the modules of a model by name, a shared one under each of its names.

    Args:
        model: The model. Wrappers (`torch.compile`, DDP, FSDP, `nn.DataParallel`) are looked through: the names are those
            of the model inside.

    Returns:
        Name, module, and why its forward is never called, parents before children.
    """
    return list(_walk(model, (), None, frozenset()))


def find_modules(pattern: str, modules: list[Found]) -> list[Found]:
    """Give the modules that a pattern names.

    Args:
        pattern: The glob pattern.
        modules: What `named_modules` gave.

    Returns:
        The modules, those whose forward is never called among them, but not those alone.

    Raises:
        UnknownModuleError: It names none, or only modules whose forward is never called; near names are offered.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> [found.name for found in find_modules("*", named_modules(net))]
        ['0', '1']
    """
    parts = _parts(pattern)
    found = [module for module in modules if _matches(parts, _parts(module.name))]
    if not found:
        msg = f"{pattern!r} names no module of this model.{_advice(pattern, modules)}"
        raise UnknownModuleError(msg)
    if all(module.idle for module in found):
        shown = "\n".join(f"  {module.name!r}: {module.idle}" for module in found[:5])
        more = f"\n  and {len(found) - 5} more" if len(found) > 5 else ""
        msg = (
            f"{pattern!r} names only modules whose forward is never called, so it would change nothing:\n{shown}{more}"
        )
        raise UnknownModuleError(msg)
    return found


def _walk(module: nn.Module, path: tuple[str, ...], parent: nn.Module | None, above: frozenset[int]) -> Iterator[Found]:
    if id(module) in above:  # a module that holds itself
        return
    above = above | {id(module)}
    wrapped = inner_of(module)
    if wrapped is not None:
        yield from _walk(wrapped, path, parent, above)
        return
    yield Found(".".join(path), module, _why_idle(module, path, parent))
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, (*path, name), module, above)


def inner_of(module: nn.Module) -> nn.Module | None:
    """Give the module that a wrapper wraps (DDP, `torch.compile`, FSDP ...); None if this is no wrapper."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    names = ("module",) if isinstance(module, DataParallel | DistributedDataParallel) else _WRAPPED
    return next((inner for name in names if (inner := module._modules.get(name)) is not None), None)


def _why_idle(module: nn.Module, path: tuple[str, ...], parent: nn.Module | None) -> str:
    around = ".".join(path[:-1])
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule, on which PyTorch supports no hooks; name the module around it"
    if isinstance(parent, nn.MultiheadAttention) and type(parent).forward is nn.MultiheadAttention.forward:
        return f"its weights are read by the {type(parent).__name__} around it; name {around!r}"
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        inside = ".".join((*path, "*"))
        return f"a {type(module).__name__} has no forward; name what is in it, {inside!r}"
    return ""


def _parts(name: str) -> tuple[str, ...]:
    return tuple(name.split(".")) if name else ()


def _matches(pattern: tuple[str, ...], name: tuple[str, ...]) -> bool:
    if not pattern:
        return not name
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        return any(_matches(rest, name[skipped:]) for skipped in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], first) and _matches(rest, name[1:])


def _advice(pattern: str, modules: list[Found]) -> str:
    names = [module.name for module in modules if module.name and not module.idle]
    if "*" in pattern:  # so that "blocks.*.attn" is offered, and not the same for each block
        names = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
    hint = near(pattern, names)
    if hint or not names:
        return hint
    shown = ", ".join(repr(name) for name in names[:8])
    more = " and so on" if len(names) > 8 else ""
    return f" Its modules are {shown}{more}; '*' stands for one part of a name, '**' for any number."
