"""What a look at source code finds: constants, losses, casts and calls that do not go with mixed precision."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mezzo.report_findings import Finding
from mezzo.report_records import SourceLine
from mezzo.torch.lint_constants import becomes_infinite, becomes_one, smallest, vanishes
from mezzo.torch.lint_logs import log_findings
from mezzo.torch.lint_syntax import called, calls_in, constant, has_float32, keyword, receiver
from mezzo.torch.lint_training_source import Function, functions_in, training_findings
from mezzo.torch.lint_unscaled import unscaled_backward

__all__ = ["source_findings"]

_FILLS = frozenset(("masked_fill", "masked_fill_", "where", "full", "full_like", "new_full", "fill_"))
_CLAMPS = frozenset(("clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_", "maximum"))
_DEFAULT_EPS = {
    "normalize": (1e-12, "aten::linalg_vector_norm"),
    "cosine_similarity": (1e-8, "aten::cosine_similarity"),
}
"""Functions of torch.nn.functional that clamp to an eps which callers rarely give, and the op whose rule decides."""


@dataclass(frozen=True)
class _Place:
    """Where a tree is from, and what is looked for."""

    file: str
    function: str
    dtype: str
    path: tuple[str, ...]

    def finding(self, kind: str, message: str, advice: str, node: ast.expr | ast.stmt) -> Finding:
        return Finding(kind, message, advice, SourceLine(self.file, node.lineno, self.function), self.path)


def source_findings(
    tree: ast.AST,
    file: str,
    dtype: str,
    *,
    path: tuple[str, ...] = (),
    in_float32: Callable[[str], bool] = lambda _op: False,
) -> Iterator[Finding]:
    r"""Look through source code. Nothing of it is run.

    Args:
        tree: The tree, whose lines are those of the file.
        file: The file.
        dtype: The lower precision that it is to run in, ``"float16"`` or ``"bfloat16"``.
        path: The module whose code it is.
        in_float32: Says whether a rule has an op computed in float32 under autocast.

    Yields:
        Findings, function by function.

    Example:
        >>> tree = ast.parse("def f(x, mask):\n    return x.masked_fill(mask, -1e9) / (x.sum() + 1e-8)")
        >>> for finding in source_findings(tree, "net.py", "float16"):
        ...     print(finding)
        net.py:2 (f): masked_fill has the constant -1e+09, which is -inf in float16
        net.py:2 (f): 1e-08 is added: it is 0 in float16, whose smallest number is 6e-08
    """
    for function in functions_in(tree):
        place = _Place(file, function.name, dtype, path)
        for node in function.low_nodes:
            if isinstance(node, ast.Call):
                yield from _fills(place, node)
                yield from _clamps(place, node)
                yield from _default_eps(place, node, in_float32)
            elif isinstance(node, ast.BinOp):
                yield from _arithmetic(place, node)
        yield from _bce(place, function)
        yield from (
            place.finding(kind, message, advice, node)
            for kind, message, advice, node in (
                *log_findings(function, dtype, in_float32),
                *training_findings(function, dtype),
            )
        )
    for call in unscaled_backward(tree):
        yield Finding("no gradient scaler", _UNSCALED, _SCALER, SourceLine(file, call.lineno), path)


_UNSCALED = (
    "the backward pass of a float16 region begins with a loss that no scaler has scaled: gradients below 3e-08 become 0, "
    "and what they are for does not learn"
)
_SCALER = (
    "scaler = mezzo.torch.GradScaler(device); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); or "
    "dtype=torch.bfloat16, which needs none"
)
_MASK_ADVICE = "fill with torch.finfo(x.dtype).min, x being what is masked"
_EPS_ADVICE = "compute it on x.float(), or take a number that {} holds, such as 1e-4"


def _fills(place: _Place, call: ast.Call) -> Iterator[Finding]:
    name = called(call)
    if name not in _FILLS or has_float32(keyword(call, "dtype")):
        return
    for argument in (*call.args, *(one.value for one in call.keywords)):
        number = constant(argument)
        if number is not None and becomes_infinite(number, place.dtype):
            message = f"{name} has the constant {number:g}, which is {_infinity(number)} in {place.dtype}"
            yield place.finding("mask overflow", message, _MASK_ADVICE, call)


def _arithmetic(place: _Place, node: ast.BinOp) -> Iterator[Finding]:
    for part, other in ((node.left, node.right), (node.right, node.left)):
        number = constant(part)
        if number is None or constant(other) is not None or has_float32(other):
            continue
        # A large positive number is more often one of nanoseconds or bytes.
        if isinstance(node.op, ast.Mult | ast.Add) and number < 0 and becomes_infinite(number, place.dtype):
            yield _mask_finding(place, number, node)
        elif isinstance(node.op, ast.Add) and number > 0 and vanishes(number, place.dtype):
            yield _eps_finding(place, f"{number:g} is added", node)
    if isinstance(node.op, ast.Sub) and not has_float32(node.left):
        number = _subtracted(node.right)
        if number is not None and constant(node.left) is None and becomes_infinite(number, place.dtype):
            yield _mask_finding(place, number, node)


def _subtracted(node: ast.expr) -> float | None:
    """Give the constant in what a mask subtracts: ``1e9`` in ``x - 1e9`` and in ``x - 1e9 * mask``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and constant(node) is None:
        found = [number for part in (node.left, node.right) if (number := constant(part)) is not None and number > 0]
        return next(iter(found), None)
    return constant(node)


def _mask_finding(place: _Place, number: float, node: ast.expr) -> Finding:
    message = f"the constant {number:g} is {_infinity(number)} in {place.dtype}"
    return place.finding("mask overflow", message, _MASK_ADVICE, node)


def _clamps(place: _Place, call: ast.Call) -> Iterator[Finding]:
    name = called(call)
    if name not in _CLAMPS or has_float32(call.func):
        return
    for argument in (*call.args, *(one.value for one in call.keywords)):
        number = constant(argument)
        if number is not None and vanishes(number, place.dtype):
            yield _eps_finding(place, f"{name} has the bound {number:g}", call)
        elif number is not None and becomes_one(number, place.dtype):
            message = f"{name} has the bound {number!r}, which is 1 in {place.dtype}, so that 1 minus it is 0"
            yield place.finding("eps lost", message, _EPS_ADVICE.format(place.dtype), call)


def _default_eps(place: _Place, call: ast.Call, in_float32: Callable[[str], bool]) -> Iterator[Finding]:
    name = called(call)
    eps, op = _DEFAULT_EPS.get(name, (0.0, ""))
    if not op or receiver(call).split(".")[-1] not in ("F", "functional") or in_float32(op):
        return
    given = keyword(call, "eps")
    number = eps if given is None else constant(given)
    if number is None or any(has_float32(argument) for argument in call.args):
        return
    if vanishes(number, place.dtype):
        yield _eps_finding(place, f"{name} has eps={number:g}", call)


def _eps_finding(place: _Place, what: str, node: ast.expr) -> Finding:
    message = f"{what}: it is 0 in {place.dtype}, whose smallest number is {smallest(place.dtype):.1g}"
    return place.finding("eps lost", message, _EPS_ADVICE.format(place.dtype), node)


def _infinity(number: float) -> str:
    return "-inf" if number < 0 else "inf"


def _bce(place: _Place, function: Function) -> Iterator[Finding]:
    from_sigmoid = {
        target.id
        for node in function.nodes
        if isinstance(node, ast.Assign) and _has_sigmoid(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in function.nodes:
        if not isinstance(node, ast.Call) or called(node) != "binary_cross_entropy" or not node.args:
            continue
        first = node.args[0]
        if _has_sigmoid(first) or (isinstance(first, ast.Name) and first.id in from_sigmoid):
            message = "binary_cross_entropy takes the logarithm of a sigmoid, which is 0 or 1 for large logits"
            advice = "F.binary_cross_entropy_with_logits(logits, target), with no sigmoid before it"
            yield place.finding("bce after sigmoid", message, advice, node)


def _has_sigmoid(node: ast.AST) -> bool:
    return any(called(call) in ("sigmoid", "Sigmoid") for call in calls_in(node))
