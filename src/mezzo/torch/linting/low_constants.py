"""Constants in source code that a lower precision does not hold: those of masks, and small ones that are added."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator

from .constants import becomes_infinite, becomes_one, smallest, vanishes
from .syntax import called, has_float32, keyword, receiver
from .values import Values

__all__ = ["constant_findings"]

_Found = tuple[str, str, str, ast.expr | ast.stmt]
"""Kind, message, advice, and where."""

_FILLS = frozenset(("masked_fill", "masked_fill_", "where", "full", "full_like", "new_full", "fill_"))

_CLAMPS = frozenset(("clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_", "maximum"))
_OPERATORS: dict[str, type[ast.operator]] = {"add": ast.Add, "sub": ast.Sub, "subtract": ast.Sub, "mul": ast.Mult}
_DEFAULT_EPS = {
    "normalize": (1e-12, "aten::linalg_vector_norm"),
    "cosine_similarity": (1e-8, "aten::cosine_similarity"),
}
"""Functions of torch.nn.functional that clamp to an eps which callers rarely give, and the op whose rule decides."""
_MASK_ADVICE = "fill with torch.finfo(x.dtype).min, x being what is masked"
_EPS_ADVICE = "compute it on x.float(), or take a number that {} holds, such as 1e-4"


def constant_findings(
    nodes: Iterable[ast.AST], values: Values, dtype: str, in_float32: Callable[[str], bool]
) -> Iterator[_Found]:
    """Look for constants that a lower precision does not hold.

    Args:
        nodes: The nodes of a function that may run in lower precision.
        values: What the function shows of its values.
        dtype: The lower precision, ``"float16"`` or ``"bfloat16"``.
        in_float32: Says whether a rule has an op computed in float32 under autocast.

    Yields:
        Kind, message, advice, and the node.

    Example:
        >>> from mezzo.torch.linting.training_source import Function
        >>> body = tuple(ast.parse("x[mask] = -1e9").body)
        >>> [(kind, message) for kind, message, *_ in
        ...  constant_findings(body, Values(Function("f", body), {}), "float16", lambda op: False)]
        [('mask overflow', 'the constant -1e+09 is -inf in float16')]
    """
    for node in nodes:
        if isinstance(node, ast.Call):
            yield from _fills(node, values, dtype)
            yield from _clamps(node, values, dtype)
            yield from _default_eps(node, values, dtype, in_float32)
        elif isinstance(node, ast.Assign):
            yield from _written(node, values, dtype)
        if (operation := _operation(node)) is not None:
            yield from _arithmetic(operation, values, dtype)


def _operation(node: ast.AST) -> ast.BinOp | None:
    """Give the operation that ``x + y``, ``x += y``, ``x.add(y)`` and ``torch.add(x, y)`` are."""
    match node:
        case ast.BinOp():
            return node
        case ast.AugAssign(target=ast.Name() | ast.Subscript() as left, op=kind, value=right):
            return ast.copy_location(ast.BinOp(left, kind, right), node)
        case ast.Call(func=ast.Attribute(value=on)) if operator := _OPERATORS.get(called(node).removesuffix("_")):
            operands = [*node.args] if receiver(node) == "torch" else [on, *node.args]
            if (other := keyword(node, "other")) is not None:
                operands.append(other)
            if len(operands) == 2:
                return ast.copy_location(ast.BinOp(operands[0], operator(), operands[1]), node)
    return None


def _fills(call: ast.Call, values: Values, dtype: str) -> Iterator[_Found]:
    name = called(call)
    if name not in _FILLS or has_float32(keyword(call, "dtype")) or values.plain(call):
        return
    if isinstance(call.func, ast.Attribute) and values.wide(call.func.value, made=False):
        return
    arguments = [*call.args, *(one.value for one in call.keywords)]
    numbers = [number for one in arguments if (number := values.number(one)) is not None]
    others = [one for one in arguments if values.number(one) is None]
    if name == "where" and (len(numbers) > 1 or any(values.wide(one, made=False) for one in others[1:])):
        return
    for number in numbers:
        if becomes_infinite(number, dtype):
            message = f"{name} has the constant {number:g}, which is {_infinity(number)} in {dtype}"
            yield "mask overflow", message, _MASK_ADVICE, call


def _written(node: ast.Assign, values: Values, dtype: str) -> Iterator[_Found]:
    """Look at ``x[mask] = -1e9``."""
    number = values.number(node.value)
    if number is None or number > 0 or not becomes_infinite(number, dtype):
        return
    for target in node.targets:
        if not isinstance(target, ast.Subscript) or _is_text(target.slice):
            continue
        if not values.plain(target.value) and not values.wide(target.value, made=False):
            yield _mask_finding(number, node, dtype)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _arithmetic(node: ast.BinOp, values: Values, dtype: str) -> Iterator[_Found]:
    for part, other in ((node.left, node.right), (node.right, node.left)):
        number = values.number(part)
        if number is None or _is_safe(other, values):
            continue
        # A large positive number is more often one of nanoseconds or bytes.
        if isinstance(node.op, ast.Mult | ast.Add) and number < 0 and becomes_infinite(number, dtype):
            yield _mask_finding(number, node, dtype)
        elif isinstance(node.op, ast.Add) and number > 0 and vanishes(number, dtype):
            yield _eps_finding(f"{number:g} is added", node, dtype)
    if isinstance(node.op, ast.Sub) and not _is_safe(node.left, values):
        number = _subtracted(node.right, values)
        if number is not None and becomes_infinite(number, dtype):
            yield _mask_finding(number, node, dtype)


def _is_safe(node: ast.expr, values: Values) -> bool:
    return values.number(node) is not None or values.wide(node) or values.plain(node)


def _subtracted(node: ast.expr, values: Values) -> float | None:
    """Give the constant in what a mask subtracts: ``1e9`` in ``x - 1e9`` and in ``x - 1e9 * mask``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and values.number(node) is None:
        parts = (values.number(node.left), values.number(node.right))
        return next((number for number in parts if number is not None and number > 0), None)
    return values.number(node)


def _mask_finding(number: float, node: ast.expr | ast.stmt, dtype: str) -> _Found:
    return "mask overflow", f"the constant {number:g} is {_infinity(number)} in {dtype}", _MASK_ADVICE, node


def _clamps(call: ast.Call, values: Values, dtype: str) -> Iterator[_Found]:
    name = called(call)
    arguments = [*call.args, *(one.value for one in call.keywords)]
    if name not in _CLAMPS or values.wide(call.func) or _base_is_safe(call, values):
        return
    for argument in arguments:
        number = values.number(argument)
        if number is not None and vanishes(number, dtype):
            yield _eps_finding(f"{name} has the bound {number:g}", call, dtype)
        elif number is not None and becomes_one(number, dtype):
            message = f"{name} has the bound {number!r}, which is 1 in {dtype}, so that 1 minus it is 0"
            yield "eps lost", message, _EPS_ADVICE.format(dtype), call


def _base_is_safe(call: ast.Call, values: Values) -> bool:
    """Say whether what is clamped is in float32, or no tensor: what stands before the dot, or the first argument."""
    if isinstance(call.func, ast.Attribute) and receiver(call) != "torch":
        return values.wide(call.func.value) or values.plain(call)
    return bool(call.args) and (values.wide(call.args[0]) or values.plain(call.args[0]))


def _default_eps(call: ast.Call, values: Values, dtype: str, in_float32: Callable[[str], bool]) -> Iterator[_Found]:
    name = called(call)
    eps, op = _DEFAULT_EPS.get(name, (0.0, ""))
    if not op or receiver(call).split(".")[-1] not in ("F", "functional") or in_float32(op):
        return
    given = keyword(call, "eps")
    number = eps if given is None else values.number(given)
    if number is None or any(values.wide(argument) for argument in call.args):
        return
    if vanishes(number, dtype):
        yield _eps_finding(f"{name} has eps={number:g}", call, dtype)


def _eps_finding(what: str, node: ast.expr, dtype: str) -> _Found:
    message = f"{what}: it is 0 in {dtype}, whose smallest number is {smallest(dtype):.1g}"
    return "eps lost", message, _EPS_ADVICE.format(dtype), node


def _infinity(number: float) -> str:
    return "-inf" if number < 0 else "inf"
