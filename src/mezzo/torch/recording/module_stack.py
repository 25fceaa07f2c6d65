"""Which module is running: a stack per thread, kept by global hooks while something watches.

Hooks of single modules would do it too, but PyTorch takes other ways through a `torch.nn.TransformerEncoderLayer` that has
some, so that looking would change what is computed. Global ones are called for every module, so they are taken off at once
when nobody watches, and do nothing in threads that nobody watches.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from mezzo.torch.module_names import inner_of, named_modules
from mezzo.torch.watch_mode import is_watched

from .memory_places import NO_PLACE, MemoryPlace, place_of

__all__ = ["ModuleNames", "Running", "current", "following_modules"]

Running = tuple[int, str]
"""Which module runs: the number of the module at the bottom of the stack, and the name below that one."""

NOWHERE: Running = (-1, "")
_modes_here = torch._C._len_torch_dispatch_stack


class ModuleNames:
    """The names of the modules that run while something watches.

    Attributes:
        compiled: Whether a module was called that `torch.compile` has wrapped.
    """

    def __init__(self) -> None:
        self.compiled = False
        self._roots: list[weakref.ref[nn.Module]] = []
        self._titles: list[str] = []
        self._known: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
        self._below: list[dict[int, tuple[str, ...]]] = []
        self._prefixes: dict[int, str] = {}
        self._parameters: dict[int, tuple[weakref.ref[torch.Tensor], int, str, str]] = {}
        self._alone: dict[int, int | None] = {}  # by the storage its only parameter; None if there are several
        self._given: set[int] = set()
        self._holders: tuple[int, _Holders] | None = None  # as they were when there were so many roots
        self._noted: set[tuple[int, str]] = set()

    def add(self, model: nn.Module) -> None:
        """Have the names of a model's modules begin at that model, also of modules that are called by themselves."""
        while (inner := inner_of(model)) is not None:
            model = inner
        number = self._root(model)
        self._prefixes[number] = ""
        self._given.add(number)
        for found in named_modules(model):
            self._note_parameters(found.module, (number, found.name))

    def enter(self, module: nn.Module, around: Running) -> Running:
        """Say which module runs, once one has been called from the one around it."""
        number, name = around
        here = self._outermost(module) if number < 0 else (number, self._name_below(number, name, module))
        if here not in self._noted:
            self._noted.add(here)
            self._note_parameters(module, here)
        return here

    def _outermost(self, module: nn.Module) -> Running:
        for number, below in enumerate(self._below):
            if id(module) in below and self._roots[number]() is not None:
                return number, below[id(module)][0]
        return self._root(module), ""

    def _root(self, module: nn.Module) -> int:
        known = self._known.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        reference = weakref.ref(module)
        self._known[id(module)] = reference, len(self._roots)
        self._roots.append(reference)
        title = type(module).__name__
        again = sum(one.partition(" ")[0] == title for one in self._titles) + 1
        self._titles.append(title if again == 1 else f"{title} {again}")
        self._below.append(_names_below(module))
        return len(self._roots) - 1

    def _name_below(self, number: int, name: str, module: nn.Module) -> str:
        names = self._below[number].get(id(module))
        if names is None:
            root = self._roots[number]()
            if root is not None and any(one is module for one in root.modules()):  # put in since
                self._below[number] = _names_below(root)
                names = self._below[number].get(id(module))
        if names is None:
            return f"{name}.({type(module).__name__})".lstrip(".")
        return next((one for one in names if one == name or one.startswith(f"{name}.") or not name), names[0])

    def _note_parameters(self, module: nn.Module, here: Running) -> None:
        for name, tensor in (*module._buffers.items(), *module._parameters.items()):
            place = NO_PLACE if tensor is None else place_of(tensor)
            if tensor is not None and place[1]:
                self._parameters[place[1]] = weakref.ref(tensor), *here, name
                self._alone[place[0]] = None if self._alone.get(place[0], place[1]) != place[1] else place[1]

    def parameter_at(self, place: MemoryPlace) -> str | None:
        """Give the name of the parameter or buffer that is at a place, or a view of which is; None if none is known."""
        known = self._parameters.get(place[1])
        if known is None:  # a part of the only parameter in this storage
            known = self._parameters.get(self._alone.get(place[0]) or 0)
        if known is None or known[0]() is None:  # its memory may be another's by now
            return None
        return self._dotted(*known[1:])

    def find_parameter(self, place: MemoryPlace) -> str | None:
        """Do the same also for modules that have not run, such as one that a checkpoint is loaded into; it takes a while."""
        if (known := self.parameter_at(place)) is not None or not place[1]:
            return known
        for thing in gc.get_objects():
            if issubclass(type(thing), nn.Module):
                parts = vars(thing)
                for name, tensor in (*parts.get("_buffers", {}).items(), *parts.get("_parameters", {}).items()):
                    if tensor is not None and place_of(tensor) == place:
                        return ".".join(filter(None, (_name_in_others(thing, _all_holders()), name)))
        return None

    def _dotted(self, number: int, *names: str) -> str:
        return ".".join(filter(None, (self._prefix(number), *names)))

    @property
    def models(self) -> list[nn.Module]:
        """The outermost modules that ran and still live."""
        return [model for root in self._roots if (model := root()) is not None]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """List the parameters of the modules that ran and still live, each once."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for number, root in enumerate(one() for one in self._roots):
            for below, parameter in root.named_parameters() if root is not None else ():
                found.setdefault(id(parameter), (self._dotted(number, below), parameter))
        return list(found.values())

    def path(self, running: Running) -> tuple[str, ...]:
        """Give the path of a record.

        Args:
            running: The module.

        Returns:
            The dotted name as ``model.named_modules()`` gives it, ``"(Net)"`` for the model itself; nothing outside of
            modules.
        """
        number, below = running
        if number < 0:
            return ()
        return (self._dotted(number, below) or f"({self._titles[number]})",)

    def _prefix(self, number: int) -> str:
        if number not in self._prefixes:
            root = self._roots[number]()
            if self._holders is None or self._holders[0] <= number:
                self._holders = len(self._roots), _all_holders()
            self._prefixes[number] = _name_in_others(root, self._holders[1]) if root is not None else ""
        prefix = self._prefixes[number]
        if prefix or number in self._given or not self._is_model(number) or self._models() < 2:
            return prefix
        # Of two models that have a layer "0", each is called by its class.
        return f"({self._titles[number]})"

    def _models(self) -> int:
        return sum(map(self._is_model, range(len(self._roots))))

    def _is_model(self, number: int) -> bool:
        return len(self._below[number]) > 1 and not self._prefixes.get(number)


def _names_below(root: nn.Module) -> dict[int, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for found in named_modules(root):
        names.setdefault(id(found.module), []).append(found.name)
    return {key: tuple(each) for key, each in names.items()}


_Holders = dict[int, tuple[weakref.ref[nn.Module], str]]
"""By the identity of a module one that holds it, and the name there."""


def _all_holders() -> _Holders:
    """Look at all that lives; it takes a while, and happens only when somebody asks for a name."""
    holders: _Holders = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module):
            for name, child in thing.__dict__.get("_modules", {}).items():
                holders.setdefault(id(child), (weakref.ref(thing), name))
    return holders


def _name_in_others(module: nn.Module, holders: _Holders) -> str:
    """Give the name of a module in the model that it is a part of, though it was called by itself."""
    parts: list[str] = []
    seen: set[int] = set()
    while id(module) in holders and id(module) not in seen:
        seen.add(id(module))
        reference, name = holders[id(module)]
        holder = reference()
        if holder is None or holder._modules.get(name) is not module:
            break
        module = holder
        if inner_of(module) is None:  # else it is the name that a wrapper has for what it wraps
            parts.append(name)
    return ".".join(reversed(parts))


class _Thread(threading.local):
    """What a thread follows: the modules that run in it, the innermost last, and whose names they get."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, Running]] = []
        self.names: list[ModuleNames] = []


_thread = _Thread()
_lock = threading.RLock()  # a generator that holds a block may be closed by the garbage collector
_following: list[ModuleNames] = []
_handles: list[RemovableHandle] = []
_filters: list[Any] = []


def _quiet() -> Any:
    """Keep PyTorch's notice from the user that a compiled module is wrapped in another, for which hooks run as well."""
    warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks on modules")
    return warnings.filters[0]


def current() -> Running:
    """Say which module runs in this thread."""
    stack = _thread.stack
    return stack[-1][1] if stack else NOWHERE


def _before(module: nn.Module, _args: Any) -> None:
    if not _modes_here() or not is_watched():
        return
    # Autograd has threads of its own, into which it carries the mode.
    followed = _thread.names or _following
    if not followed:
        return
    names = followed[0]
    around = current()
    # A wrapper is not a part of any name.
    here = around if inner_of(module) is not None else names.enter(module, around)
    names.compiled = names.compiled or type(module).__name__ == "OptimizedModule"
    _thread.stack.append((module, here))


def _after(module: nn.Module, _args: Any, _output: Any) -> None:
    stack = _thread.stack
    # It may have been called before anybody watched. Those above it were left by an exception that calls no hooks.
    if any(one is module for one, _ in stack):
        while stack.pop()[0] is not module:
            pass


@contextmanager
def following_modules(model: nn.Module | None = None) -> Iterator[ModuleNames]:
    """Keep the stack of this thread's modules while the block runs.

    Args:
        model: A model whose names are wanted.

    Yields:
        Their names; the same object in a block inside of another, which may end before or after it.
    """
    thread = _thread
    names = thread.names[0] if thread.names else ModuleNames()
    if model is not None:
        names.add(model)
    with _lock:
        if not _following:
            _handles.append(register_module_forward_pre_hook(_before))
            _handles.append(register_module_forward_hook(_after, always_call=True))
            _filters.append(_quiet())
        _following.append(names)
    if not thread.names:
        thread.stack = []
    thread.names.append(names)
    try:
        yield names
    finally:
        thread.names.remove(names)
        if not thread.names:
            thread.stack = []
        with _lock:
            _following.remove(names)
            if not _following:
                while _handles:
                    _handles.pop().remove()
                with contextlib.suppress(ValueError):  # where the filters were replaced meanwhile, it is not among them
                    warnings.filters.remove(_filters.pop())  # type: ignore[attr-defined]
