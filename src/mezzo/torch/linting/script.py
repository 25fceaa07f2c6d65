"""Which functions of a script work on what a model computes, as far as its text tells."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from .syntax import called
from .training_source import Function

__all__ = ["low_functions"]


def low_functions(functions: Sequence[Function]) -> list[Function]:
    r"""Pick the methods of modules, and the functions that these, or regions of autocast, call by name.

    Args:
        functions: All functions of the script.

    Returns:
        Those functions, in no order to rely on.

    Example:
        >>> from mezzo.torch.linting.training_source import functions_in
        >>> tree = ast.parse(
        ...     "def loss(y): return y\ndef metric(y): return y\nwith autocast('cuda'):\n    loss(net(x))\nmetric(x)"
        ... )
        >>> [function.name for function in low_functions([*functions_in(tree)])]
        ['loss']
    """
    found = [function for function in functions if function.owner is not None and _is_module(function.owner)]
    names = _called_in(node for function in functions for node in function.region_nodes)
    waiting = [*found]
    while waiting or names:
        names |= _called_in(node for function in waiting for node in function.nodes)
        waiting = [function for function in functions if function.name in names and function not in found]
        found += waiting
        names = set()
    return found


def _is_module(owner: ast.ClassDef) -> bool:
    """Say whether a class is a module: its base is called so, or it has a forward pass."""
    bases = [ast.unparse(base) for base in owner.bases]
    methods = {part.name for part in owner.body if isinstance(part, ast.FunctionDef)}
    return any(base.endswith("Module") for base in bases) or "forward" in methods


def _called_in(nodes: Iterable[ast.AST]) -> set[str]:
    return {called(node) for node in nodes if isinstance(node, ast.Call)}
