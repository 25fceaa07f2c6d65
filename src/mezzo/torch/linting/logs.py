"""Logarithms of probabilities in source code, which are -inf where a lower precision rounds the probability to 0."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from .syntax import called, calls_in, constant, has_float32, low_cast, pairs
from .training_source import Function
from .values import Values

__all__ = ["log_findings"]

_Found = tuple[str, str, str, ast.expr]
"""Kind, message, advice, and where."""

_MAKERS = {"sigmoid": "sigmoid", "Sigmoid": "sigmoid", "softmax": "softmax", "Softmax": "softmax"}
_SOFTMAX = "aten::softmax.int"


def log_findings(function: Function, dtype: str, in_float32: Callable[[str], bool]) -> Iterator[_Found]:
    r"""Look for ``log`` of a sigmoid, of 1 minus one, and of a softmax, in one expression or through a name.

    bfloat16 goes down to 1e-38 as float32 does; there only 1 minus a sigmoid becomes 0.

    Args:
        function: The function.
        dtype: The lower precision that it is to run in.
        in_float32: Says whether a rule has an op computed in float32 under autocast.

    Yields:
        Kind, message, advice, and the node.

    Example:
        >>> body = tuple(ast.parse("p = torch.sigmoid(x)\nloss = -torch.log(1 - p)").body)
        >>> for _, message, advice, _ in log_findings(Function("f", body), "float16", lambda op: False):
        ...     print(message, "->", advice)
        log of 1 minus a sigmoid, which is 0 in float16 from logits of 8.4 on -> F.logsigmoid(-logits)
    """
    named, values = _named(function), Values(function, {})
    for node in function.low_nodes:
        if isinstance(node, ast.Call) and called(node) in ("log", "log_") and (inner := _argument(node)) is not None:
            one_minus, probability = _without_one(inner)
            made = named.get(probability.id, probability) if isinstance(probability, ast.Name) else probability
            found = _maker(made)
            if not found or _is_float32(found, made, in_float32) or values.wide(made):
                continue
            if text := _text(found, dtype, one_minus):
                yield "log of probabilities", *text, node


def _named(function: Function) -> dict[str, ast.expr]:
    """Give the expression that each name was set to; of several the last, and none of those that a loop sets."""
    found: dict[str, ast.expr] = {}
    for node in function.nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                found.update(pairs(target, node.value))
    return found


def _argument(call: ast.Call) -> ast.expr | None:
    """Give what the logarithm is taken of: the argument of ``torch.log(x)``, or ``x`` in ``x.log()``."""
    if call.args:
        return call.args[0]
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def _without_one(node: ast.expr) -> tuple[bool, ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and constant(node.left) == 1:
        return True, node.right
    return False, node


def _maker(node: ast.expr) -> str:
    """Say which op makes the probability that an expression is, casts and picked elements aside; empty if none does."""
    while True:
        match node:
            case ast.Call() if made := _MAKERS.get(called(node)):
                return made
            case ast.Call(func=ast.Attribute(value=inner)) if low_cast(node):
                node = inner
            case ast.Call(func=ast.Call() as inner):  # nn.Softmax(-1)(x)
                node = inner
            case ast.Subscript(value=inner):
                node = inner
            case _:
                return ""


def _is_float32(maker: str, node: ast.expr, in_float32: Callable[[str], bool]) -> bool:
    if has_float32(node):
        return True
    rounded = any(low_cast(call) for call in calls_in(node))
    return maker == "softmax" and not rounded and in_float32(_SOFTMAX)


def _text(maker: str, dtype: str, one_minus: bool) -> tuple[str, str] | None:
    if maker == "sigmoid" and one_minus:
        end = "8.4" if dtype == "float16" else "6.3"
        return f"log of 1 minus a sigmoid, which is 0 in {dtype} from logits of {end} on", "F.logsigmoid(-logits)"
    if dtype != "float16" or one_minus:
        return None
    if maker == "sigmoid":
        return "log of a sigmoid, which is 0 in float16 below logits of -17.3", "F.logsigmoid(logits)"
    return "log of a softmax, which is 0 in float16 for what is below 3e-08", "F.log_softmax(logits, dim)"
