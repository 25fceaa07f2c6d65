"""Autocast regions that are made in one place and entered in another: ``ctx = torch.autocast(...)``, then ``with ctx:``."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .syntax import called, is_autocast, pairs

__all__ = ["put_regions_in_place"]


def put_regions_in_place(tree: ast.AST) -> None:
    r"""Have each ``with`` statement of a tree say itself which autocast region it enters, where a name says it now.

    A name stands for a region if the tree sets it to one somewhere, be it in one branch only (``nullcontext() if cpu else
    autocast(...)``), to a ``partial`` of one, or defines it as a function that returns one. The tree is changed in place;
    what is put into a statement keeps its own lines.

    Args:
        tree: The code, of a file or of a function.

    Example:
        >>> tree = ast.parse("ctx = autocast('cuda', dtype=torch.float16)\nwith ctx:\n    loss = net(x).sum()")
        >>> put_regions_in_place(tree)
        >>> print(ast.unparse(tree.body[1].items[0]))
        autocast('cuda', dtype=torch.float16)
    """
    regions, makers = _named(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.withitem):
            continue
        context = node.context_expr
        if isinstance(context, ast.Call) and is_autocast(node) is None:
            made = makers.get(_name(context.func))
            if made is not None:
                node.context_expr = _called_with(made, context)
        elif isinstance(context, ast.Name | ast.Attribute) and _name(context) in regions:
            node.context_expr = regions[_name(context)]


def _named(tree: ast.AST) -> tuple[dict[str, ast.Call], dict[str, ast.Call]]:
    """Give what stands for a region, and what gives one when it is called, by their names."""
    regions: dict[str, ast.Call] = {}
    makers: dict[str, ast.Call] = {}
    for name, value in _set(tree):
        for one in _alternatives(value):
            if _is_region(one):
                regions.setdefault(name, one)
            elif called(one) == "partial" and one.args and _name(one.args[0]) == "autocast":
                region = ast.Call(one.args[0], one.args[1:], one.keywords)
                makers.setdefault(name, ast.copy_location(region, one))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
            if made := [one for value in returned for one in _alternatives(value) if _is_region(one)]:
                makers[function.name] = made[0]
    return regions, makers


def _set(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Go through all that is set to something, by the last part of its name: ``ctx`` for ``self.ctx``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute):
                    yield target.attr, node.value
                yield from pairs(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield _name(node.target), node.value


def _alternatives(value: ast.expr) -> Iterator[ast.Call]:
    """Give the calls that a value may be the result of."""
    if isinstance(value, ast.IfExp):
        yield from _alternatives(value.body)
        yield from _alternatives(value.orelse)
    elif isinstance(value, ast.Call):
        yield value


def _is_region(call: ast.Call) -> bool:
    return is_autocast(ast.withitem(call)) is not None


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _called_with(made: ast.Call, call: ast.Call) -> ast.Call:
    """Give the call that makes the region, with what it is given where it is entered, which counts first."""
    given = {one.arg for one in call.keywords}
    keywords = [*call.keywords, *(one for one in made.keywords if one.arg not in given)]
    return ast.copy_location(ast.Call(made.func, made.args, keywords), call)
