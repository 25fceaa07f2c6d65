"""Packages imported in advance and out of sight, until a program imports them: so that it sees no more than it asked for.

It must know of nothing here but the standard library, and of no other file of the tests: the server that uses it is a
bare interpreter.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["Stages"]


class Stages(MetaPathFinder, Loader):
    """Modules in the order of their import, in stages: what ``import torch`` loads is one, what comes on top another.

    A stage comes back whole, with those that it needs, when one of its modules is imported. Until then its modules are
    neither in ``sys.modules`` nor attributes of their packages, as if nobody had loaded them: a program that forgets an
    import fails as it does elsewhere. The standard library stays in sight.
    """

    def __init__(self) -> None:
        self._modules: list[dict[str, ModuleType]] = []
        self._needs: list[set[int]] = []
        self._stage_of: dict[str, int] = {}
        self._back: set[int] = set()
        sys.meta_path.insert(0, self)

    def load(self, name: str) -> None:
        """Import a module; what that has loaded is a stage."""
        self.hide()
        before = set(sys.modules)
        importlib.import_module(name)
        new = {
            name: module
            for name, module in sys.modules.items()
            if name not in before
            and name not in self._stage_of
            and name != "__mp_main__"  # multiprocessing's other name of the main module
            and name.partition(".")[0] not in sys.stdlib_module_names
        }
        self._stage_of.update(dict.fromkeys(new, len(self._modules)))
        self._needs.append(set(self._back))
        self._modules.append(new)
        self._back.add(len(self._modules) - 1)

    def loaded(self, name: str) -> Any:
        """Give a module that may be out of sight, or None if nothing has loaded it."""
        stage = self._stage_of.get(name)
        return None if stage is None else self._modules[stage][name]

    def hide(self) -> None:
        """Put all modules out of sight."""
        for stage in sorted(self._back):
            self._hide(stage)
        self._back.clear()

    def _hide(self, stage: int) -> None:
        for name, module in self._modules[stage].items():
            sys.modules.pop(name, None)
            parent, last = self._outside(name, stage)
            if parent is not None and parent.__dict__.get(last) is module:
                delattr(parent, last)

    def _bring_back(self, stage: int) -> None:
        self._back.add(stage)
        sys.modules.update(self._modules[stage])
        for name, module in self._modules[stage].items():
            parent, last = self._outside(name, stage)
            if parent is not None:
                setattr(parent, last, module)

    def _outside(self, name: str, stage: int) -> tuple[ModuleType | None, str]:
        """Give the package of a module if it is of another stage, and the module's name in it."""
        package, _, last = name.rpartition(".")
        of = self._stage_of.get(package, stage)
        return (None if of == stage else self._modules[of][package]), last

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that is out of sight. Asking alone brings nothing back."""
        stage = self._stage_of.get(fullname)
        if stage is None:
            return None
        module = self._modules[stage][fullname]
        spec = ModuleSpec(fullname, self, is_package=hasattr(module, "__path__"))
        if module.__spec__ is not None:
            spec.origin, spec.submodule_search_locations = (
                module.__spec__.origin,
                module.__spec__.submodule_search_locations,
            )
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Give the module as it was loaded; the import system is about to give it another spec."""
        module = self._modules[self._stage_of[spec.name]][spec.name]
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Bring back the module's stage, and those that it needs."""
        spec = module.__spec__
        if spec is None:
            return
        module.__spec__ = spec.loader_state
        stage = self._stage_of[spec.name]
        for each in sorted({stage, *self._needs[stage]} - self._back):
            self._bring_back(each)
