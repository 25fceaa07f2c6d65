"""Reading Python's syntax trees: constants, names of what is called, and dtypes that an expression asks for."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator

__all__ = [
    "called",
    "calls_in",
    "constant",
    "dtype_named",
    "has_float32",
    "is_autocast",
    "keyword",
    "low_cast",
    "pairs",
    "receiver",
]

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_FINFO = {"float32": 3.4028234663852886e38, "float64": 1.7976931348623157e308}
_CAST_METHODS = {"half": "float16", "bfloat16": "bfloat16"}


def constant(node: ast.AST | None) -> float | None:
    """Work out a number that is written down; None if the expression is something else.

    Example:
        >>> [constant(ast.parse(text).body[0].value) for text in ("-1e9", "1 - 0.25", "torch.finfo(torch.float32).min", "x")]
        [-1000000000.0, 0.75, -3.4028234663852886e+38, None]
    """
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() | float() as value):
            return float(value) if abs(value) < 1e308 else None
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(text))]):
            return _read(text)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            number = constant(inner)
            return None if number is None else -number
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _BINARY:
            return _worked_out(_BINARY[type(kind)], constant(left), constant(right))
        case ast.Attribute(value=ast.Call() as call, attr="min" | "max" as end) if (
            called(call) == "finfo" and call.args
        ):
            bound = _FINFO.get(dtype_named(call.args[0]))
            return bound if bound is None or end == "max" else -bound
    return None


def _read(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < 1e308 else None


def _worked_out(work: Callable[[float, float], float], left: float | None, right: float | None) -> float | None:
    if left is None or right is None:
        return None
    try:
        result = work(left, right)
    except (ArithmeticError, ValueError):
        return None
    return result if isinstance(result, float) else None


def called(call: ast.Call) -> str:
    """Give the last part of the name of what is called: ``"relu"`` for ``F.relu(x)``; empty if it has no name.

    Example:
        >>> called(ast.parse("torch.nn.functional.relu(x)").body[0].value)
        'relu'
    """
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def receiver(call: ast.Call) -> str:
    """Give what stands before the last dot of what is called: ``"F"`` for ``F.relu(x)``; empty without a dot.

    Example:
        >>> receiver(ast.parse("self.scaler.scale(loss)").body[0].value)
        'self.scaler'
    """
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Give an argument that is passed by its name; None if it is not."""
    return next((one.value for one in call.keywords if one.arg == name), None)


def pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Go through the names of a target of an assignment, each with the expression that it is set to.

    Example:
        >>> [statement] = ast.parse("a, b = 1, 2").body
        >>> [(name, ast.unparse(value)) for name, value in pairs(statement.targets[0], statement.value)]
        [('a', '1'), ('b', '2')]
    """
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, its in zip(target.elts, value.elts, strict=True):
            yield from pairs(one, its)


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """Go through the calls in a tree, in the order in which they are written; those in functions inside come too."""
    found = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
    yield from sorted(found, key=lambda call: (call.end_lineno or 0, call.end_col_offset or 0))


def is_autocast(item: ast.withitem) -> bool | None:
    """Say whether an item of a ``with`` statement is an autocast region that is on, or one that is off; None if neither.

    Example:
        >>> [is_autocast(item) for item in ast.parse("with torch.autocast('cpu'), autocast('cpu', enabled=False), f(): 0")
        ...  .body[0].items]
        [True, False, None]
    """
    call = item.context_expr
    if not isinstance(call, ast.Call) or called(call) != "autocast":
        return None
    enabled = keyword(call, "enabled")
    return not (isinstance(enabled, ast.Constant) and enabled.value is False)


def low_cast(call: ast.Call) -> str:
    """Give the lower precision that a call casts to; empty if it casts to none.

    Example:
        >>> [low_cast(ast.parse(text).body[0].value) for text in ("x.half()", "x.to(dtype=torch.bfloat16)", "x.to('cuda')")]
        ['float16', 'bfloat16', '']
    """
    name = called(call)
    if not isinstance(call.func, ast.Attribute):
        return ""
    if name in _CAST_METHODS:
        return _CAST_METHODS[name]
    if name not in ("to", "type"):
        return ""
    dtypes = (dtype_named(node) for node in (*call.args, *(one.value for one in call.keywords)))
    return next((dtype for dtype in dtypes if dtype in _CAST_METHODS.values()), "")


def has_float32(node: ast.AST | None) -> bool:
    """Say whether an expression asks for float32 or float64 somewhere: ``x.float()``, ``dtype=torch.float32``."""
    if node is None:
        return False
    return any(
        (isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in ("float", "double"))
        or dtype_named(one) in _FINFO
        for one in ast.walk(node)
    )


def dtype_named(node: ast.AST) -> str:
    """Give the dtype that an expression names, by its full name; the name itself if it is none.

    Example:
        >>> [dtype_named(ast.parse(text).body[0].value) for text in ("torch.half", "'float32'", "f(x)")]
        ['float16', 'float32', '']
    """
    name = node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else ""
    return {"half": "float16", "float": "float32", "double": "float64"}.get(name, name) if isinstance(name, str) else ""
