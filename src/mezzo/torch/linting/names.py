"""Which numbers names stand for, in a scope of a program that runs and in the text of one that does not."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from .syntax import constant, pairs

__all__ = ["constants_of", "numbers_in", "set_by"]


def numbers_in(scope: Mapping[str, object]) -> dict[str, float]:
    """Pick the numbers of a scope, such as a module's, by their names.

    Example:
        >>> numbers_in({"EPS": 1e-8, "FLAG": True, "name": "x"})
        {'EPS': 1e-08}
    """
    numbers = [(name, value) for name, value in [*scope.items()] if isinstance(value, int | float)]
    return {name: float(value) for name, value in numbers if not isinstance(value, bool) and abs(value) < 1e308}


def constants_of(body: list[ast.stmt]) -> dict[str, float]:
    r"""Give the numbers that statements set names to, of names that they set once.

    Example:
        >>> constants_of(ast.parse("EPS = 1e-8\nstep = 0\nstep = 1\nname = f()").body)
        {'EPS': 1e-08}
    """
    stores = [
        node.id
        for statement in body
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    found = ((name, constant(value)) for statement in body for name, value in set_by(statement) if value is not None)
    return {name: number for name, number in found if number is not None and stores.count(name) == 1}


def set_by(statement: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Go through the names that an assignment sets, each with its expression; nothing for another statement.

    Example:
        >>> [(name, ast.unparse(value)) for name, value in set_by(ast.parse("a = b = 1").body[0])]
        [('a', '1'), ('b', '1')]
    """
    match statement:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from pairs(target, value)
        case (
            ast.AnnAssign(target=ast.Name(id=name), value=value) | ast.NamedExpr(target=ast.Name(id=name), value=value)
        ):
            yield name, value
