"""The tree of modules as rows of a table: alike neighbours folded, and no deeper than there is room for. No framework."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .modules import ModuleTotals

__all__ = ["Row", "tree_rows"]

_WHOLE = "(whole)"


@dataclass(frozen=True)
class Row:
    """One row: a module, or several neighbours that are alike.

    Attributes:
        depth: How far it is to be indented; 0 is the whole.
        label: What to call it: the part of the name below the row that it belongs to.
        module: The module, of several the first.
        alike: How many modules it stands for; each has the totals of the first.

    Example:
        >>> from mezzo.report.records import OpRecord
        >>> ops = [OpRecord("add", "promote", path=(f"layers.{layer}.mlp",)) for layer in range(3)]
        >>> from mezzo.report.modules import module_tree
        >>> rows, folded = tree_rows(module_tree(ops), rows=10)
        >>> [(row.depth, row.text) for row in rows]
        [(0, '(whole)'), (1, 'layers'), (2, '0 .. 2, each'), (3, 'mlp')]
    """

    depth: int
    label: str
    module: ModuleTotals
    alike: int = 1

    @property
    def text(self) -> str:
        """The label, and that the numbers are of each of several."""
        return f"{self.label}, each" if self.alike > 1 else self.label


def tree_rows(tree: ModuleTotals, *, rows: int | None = None) -> tuple[list[Row], int]:
    """Lay out a tree of modules.

    Args:
        tree: The root.
        rows: How many rows to keep to; None keeps to none. One level is shown whatever it says.

    Returns:
        The rows, and how many levels were left out, 0 if all are there.
    """
    laid = [Row(0, tree.label or _WHOLE, tree), *_inside(tree, 1)]
    deepest = max(row.depth for row in laid)
    depth = deepest
    while rows is not None and depth > 1 and sum(row.depth <= depth for row in laid) > rows:
        depth -= 1
    return [row for row in laid if row.depth <= depth], deepest - depth


def _inside(parent: ModuleTotals, depth: int) -> Iterator[Row]:
    for group in _groups(parent.modules):
        module, label = _chain(group[0])
        if len(group) > 1:
            module, label = group[0], f"{group[0].label} .. {group[-1].label}"
        yield Row(depth, label, module, len(group))
        yield from _inside(module, depth + 1)


def _groups(modules: tuple[ModuleTotals, ...]) -> list[list[ModuleTotals]]:
    """Put neighbours together that are alike and numbered, as the layers of a model are."""
    groups: list[list[ModuleTotals]] = []
    for module in modules:
        if groups and module.label.isdecimal() and groups[-1][0].label.isdecimal() and _alike(groups[-1][0], module):
            groups[-1].append(module)
        else:
            groups.append([module])
    return groups


def _alike(one: ModuleTotals, other: ModuleTotals) -> bool:
    return (
        (one.own, one.totals, one.numbers) == (other.own, other.totals, other.numbers)
        and [module.label for module in one.modules] == [module.label for module in other.modules]
        and all(_alike(*pair) for pair in zip(one.modules, other.modules, strict=True))
    )


def _chain(module: ModuleTotals) -> tuple[ModuleTotals, str]:
    """Go down from a module that has nothing but one other module in it: one row is enough for both."""
    label = module.label
    while not module.own.ops and len(module.modules) == 1:
        (module,) = module.modules
        label = f"{label}.{module.label}"
    return module, label
