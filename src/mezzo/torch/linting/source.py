"""What a look at source code finds: constants, losses, casts and calls that do not go with mixed precision."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mezzo.report.findings import Finding
from mezzo.report.records import SourceLine

from .logs import log_findings
from .low_constants import constant_findings
from .named_regions import put_regions_in_place
from .names import constants_of
from .script import low_functions
from .syntax import called, calls_in
from .training_source import Function, functions_in, training_findings
from .unscaled import unscaled_backward
from .values import Values

__all__ = ["source_findings"]


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
    outer: Mapping[str, float] = MappingProxyType({}),
    script: bool = False,
) -> Iterator[Finding]:
    r"""Look through source code. Nothing of it is run.

    Args:
        tree: The tree, whose lines are those of the file; names of regions in it are replaced by what they stand for.
        file: The file.
        dtype: The lower precision that it is to run in, ``"float16"`` or ``"bfloat16"``.
        path: The module whose code it is.
        in_float32: Says whether a rule has an op computed in float32 under autocast.
        outer: Numbers that names outside of the tree stand for.
        script: Whether it is a whole script, of which much is not for a model: constants are then looked for only in
            regions, in modules, and in the functions that these call by name.

    Yields:
        Findings, function by function.

    Example:
        >>> tree = ast.parse("def f(x, mask):\n    return x.masked_fill(mask, -1e9) / (x.sum() + 1e-8)")
        >>> for finding in source_findings(tree, "net.py", "float16"):
        ...     print(finding)
        net.py:2 (f): masked_fill has the constant -1e+09, which is -inf in float16
        net.py:2 (f): 1e-08 is added: it is 0 in float16, whose smallest number is 6e-08
    """
    put_regions_in_place(tree)
    functions = [*functions_in(tree)]
    numbers = {**outer, **(constants_of(tree.body) if isinstance(tree, ast.Module) else {})}
    low = low_functions(functions) if script else functions
    for function in functions:
        place = _Place(file, function.name, dtype, path)
        nodes = function.low_nodes if function in low else function.region_nodes
        for kind, message, advice, node in constant_findings(nodes, Values(function, numbers), dtype, in_float32):
            yield place.finding(kind, message, advice, node)
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
