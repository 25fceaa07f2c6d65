"""What the records add up to in each module, as a tree. No framework."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import Any

from .numbers import Numbers
from .records import OpRecord
from .totals import Totals

__all__ = ["ModuleTotals", "module_tree", "numbers_by_phase"]

Parts = tuple[str, ...]


@dataclass(frozen=True)
class ModuleTotals:
    """What the ops of one module add up to.

    Attributes:
        name: The module's whole name, ``""`` for the root, which holds all.
        own: The totals of the ops directly in it.
        totals: The totals of these and of the ops in the modules inside it.
        modules: The modules inside it, in the order of their first op.
        numbers: Phase to how large the results of its ops and of those inside are; empty if that was not asked for.
        label: The last part of the name.

    Example:
        >>> tree = module_tree([OpRecord("add", "promote", path=("layers.0.mlp",)), OpRecord("exp", "fp32")])
        >>> [(depth, module.name, module.totals.ops) for depth, module in tree.walk()]
        [(0, '', 2), (1, 'layers', 1), (2, 'layers.0', 1), (3, 'layers.0.mlp', 1)]
        >>> tree["layers.0"].own.ops
        0
    """

    name: str
    own: Totals
    totals: Totals
    modules: tuple[ModuleTotals, ...] = ()
    numbers: Mapping[str, Numbers] = field(default_factory=lambda: MappingProxyType({}))
    label: str = ""

    def walk(self, depth: int = 0) -> Iterator[tuple[int, ModuleTotals]]:
        """Give it and all modules inside, each before those inside it.

        Args:
            depth: How deep it is itself.

        Yields:
            The depth, and the module.
        """
        yield depth, self
        for module in self.modules:
            yield from module.walk(depth + 1)

    def __getitem__(self, name: str) -> ModuleTotals:
        """Find a module inside by its whole name.

        Raises:
            KeyError: There is none of that name, or none in which an op ran.
        """
        for _, module in self.walk():
            if module.name == name:
                return module
        msg = f"No op ran in a module of the name {name!r}. Directly inside {self.name!r} are: "
        raise KeyError(msg + (", ".join(repr(module.name) for module in self.modules) or "none"))

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain data that JSON can hold.

        Returns:
            ``name``, ``own``, ``totals``, ``numbers``, and ``modules``: a list of the same.
        """
        return {
            "name": self.name,
            "own": self.own.as_dict(),
            "totals": self.totals.as_dict(),
            "numbers": {phase: numbers.as_dict() for phase, numbers in self.numbers.items()},
            "modules": [module.as_dict() for module in self.modules],
        }


def module_tree(records: Iterable[OpRecord], *, separator: str = ".") -> ModuleTotals:
    """Add records up by the module that they were called in.

    Args:
        records: Any records, in the order of time.
        separator: What stands between a module's name and its parent's, in names and in the entries of a path.

    Returns:
        The root, whose totals are those of all the records. An entry in parentheses, the class of a module of which the
        name is not known, is not divided.

    Example:
        >>> module_tree([OpRecord("add", "promote", path=("jit f", "scan"))], separator="/").modules[0].modules[0].name
        'jit f/scan'
    """
    own: dict[Parts, list[OpRecord]] = {(): []}
    for record in records:
        parts = _parts(record.path, separator)
        if parts not in own:
            own.update({parts[:depth]: [] for depth in range(1, len(parts) + 1) if parts[:depth] not in own})
        own[parts].append(record)
    inside: dict[Parts, list[ModuleTotals]] = {parts: [] for parts in own}
    # The deepest first, so that what is inside of a module is there when it is added up. Sorting keeps the order of time.
    for parts in sorted(filter(None, own), key=len, reverse=True):
        module = _module(separator.join(parts), own[parts], inside[parts], parts[-1])
        inside[parts[:-1]].append(module)
    return _module("", own[()], inside[()], "")


def numbers_by_phase(records: Iterable[OpRecord]) -> Mapping[str, Numbers]:
    """Merge the numbers of records, activations and gradients apart.

    Args:
        records: Any records; those without numbers are left out.

    Returns:
        Phase to the numbers of all its results.
    """
    found: dict[str, list[Numbers]] = {}
    for record in records:
        if record.numbers is not None:
            found.setdefault(record.phase, []).append(record.numbers)
    return _merged(found)


def _merged(found: Mapping[str, Sequence[Numbers]]) -> Mapping[str, Numbers]:
    return MappingProxyType({phase: Numbers.merge(numbers) for phase, numbers in found.items()})


def _parts(path: Parts, separator: str) -> Parts:
    entries = [[entry] if entry.startswith("(") else entry.split(separator) for entry in path]
    return tuple(part for entry in entries for part in entry if part)


def _module(name: str, records: list[OpRecord], modules: list[ModuleTotals], label: str) -> ModuleTotals:
    own = Totals.of(records)
    found = {phase: [numbers] for phase, numbers in numbers_by_phase(records).items()}
    for module in modules:
        for phase, numbers in module.numbers.items():
            found.setdefault(phase, []).append(numbers)
    totals = reduce(add, (module.totals for module in modules), own)
    return ModuleTotals(name, own, totals, tuple(modules), _merged(found), label)
