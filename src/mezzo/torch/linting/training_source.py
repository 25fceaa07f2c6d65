"""What the source code of a training loop shows: what is called inside of autocast regions, and in which order."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .syntax import called, calls_in, has_float32, is_autocast, keyword, low_cast, receiver

__all__ = ["Function", "functions_in", "training_findings"]

_Found = tuple[str, str, str, ast.expr]
"""Kind, message, advice, and where."""

_Branches = dict[int, str]
"""The ``if`` statements that a node is in, each with the part of it."""

_CLIPS = ("clip_grad_norm_", "clip_grad_value_")
_MOVES = ("to", "cuda", "cpu", "contiguous", "rand", "randn", "ones", "zeros", "tensor", "from_numpy", "load", "next")
"""Calls that make or move what goes into a model; another computes something."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclass(frozen=True, eq=False)
class Function:
    """A function, or what stands outside of all functions, without the functions and classes inside it.

    Attributes:
        name: Its name; ``"<module>"`` outside of all.
        body: Its statements.
        arguments: Its parameters, if it is a function.
        region: Whether a decorator runs it in a region that is on, or in one that is off.
        owner: The class whose method it is.
    """

    name: str
    body: tuple[ast.AST, ...]
    arguments: ast.arguments | None = None
    region: bool | None = None
    owner: ast.ClassDef | None = None

    @cached_property
    def _placed(self) -> list[tuple[ast.AST, bool | None]]:
        return [pair for statement in self.body for pair in _walk(statement, self.region)]

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of its nodes, in the order of the text."""
        return [node for node, _ in self._placed]

    @cached_property
    def low_nodes(self) -> list[ast.AST]:
        """Those that are not in a region that is off."""
        return [node for node, region in self._placed if region is not False]

    @cached_property
    def region_nodes(self) -> list[ast.AST]:
        """Those that are in a region that is on."""
        return [node for node, region in self._placed if region]

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Its calls, in the order in which they end in the text."""
        found = [node for node in self.nodes if isinstance(node, ast.Call)]
        return sorted(found, key=lambda call: (call.end_lineno or 0, call.end_col_offset or 0))


def _walk(node: ast.AST, region: bool | None) -> Iterator[tuple[ast.AST, bool | None]]:
    yield node, region
    if isinstance(node, _SCOPES):
        return
    inside = region
    if isinstance(node, ast.With | ast.AsyncWith):
        switches = [switch for item in node.items if (switch := is_autocast(item)) is not None]
        inside = switches[-1] if switches else region
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, inside)


def functions_in(tree: ast.AST) -> Iterator[Function]:
    r"""Go through the functions of a tree, also those inside of others, and what stands outside of all.

    Example:
        >>> [function.name for function in functions_in(ast.parse("x = 1\ndef f(): pass"))]
        ['<module>', 'f']
    """
    if isinstance(tree, ast.Module):
        yield Function("<module>", tuple(tree.body))
    owners = {id(part): node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for part in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            region = _decorated(node.decorator_list)
            yield Function(node.name, tuple(node.body), node.args, region, owners.get(id(node)))


def _decorated(decorators: list[ast.expr]) -> bool | None:
    """Say whether decorators have a function run under autocast, or without it; None if they say nothing."""
    for one in decorators:
        if isinstance(one, ast.Call) and called(one) == "custom_fwd" and has_float32(keyword(one, "cast_inputs")):
            return False
        if (switch := is_autocast(ast.withitem(one))) is not None:
            return switch
    return None


def training_findings(function: Function, dtype: str) -> Iterator[_Found]:
    """Look at the calls of a function.

    Args:
        function: The function.
        dtype: The lower precision that it is to run in.

    Yields:
        Kind, message, advice, and the node.
    """
    yield from _backward(function)
    yield from _clips_scaled(function)
    yield from _low_casts(function)
    if dtype == "float16":
        yield from _float16_losses(function)


def _backward(function: Function) -> Iterator[_Found]:
    for node in function.region_nodes:
        if not isinstance(node, ast.Call):
            continue
        grad = called(node) == "grad" and receiver(node).endswith("autograd")
        if grad or (called(node) == "backward" and receiver(node) not in ("", "super()")):
            what = ast.unparse(node.func)
            message = (
                f"{what} is called inside of an autocast region: autocast chooses the dtypes of the backward ops anew"
            )
            yield "backward in region", message, "end the region after the loss, and call it behind the block", node


def _clips_scaled(function: Function) -> Iterator[_Found]:
    scaled: list[_Branches] = []
    branches = {id(node): path for statement in function.body for node, path in _branches(statement, {})}
    for call in function.calls:
        name, on = called(call), receiver(call)
        if name == "scale" and "scaler" in on.lower():
            scaled.append(branches[id(call)])
        elif name in ("unscale_", "step"):
            scaled.clear()
        elif name in _CLIPS and _any_before(scaled, branches[id(call)]) and "scaler" not in on.lower():
            message = f"{name} is called while the gradients have the scale of the scaler"
            advice = (
                "scaler.unscale_(optimizer) before it; mezzo's scaler.clip_grad_norm_(optimizer, max_norm) does both"
            )
            yield "scaled gradients clipped", message, advice, call


def _branches(node: ast.AST, path: _Branches) -> Iterator[tuple[ast.AST, _Branches]]:
    """Go through nodes with the branches that they are in."""
    yield node, path
    for field, value in ast.iter_fields(node):
        inside = {**path, id(node): field} if isinstance(node, ast.If) and field in ("body", "orelse") else path
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _branches(child, inside)


def _any_before(scaled: list[_Branches], here: _Branches) -> bool:
    """Say whether one of the calls may have run before: it is in no other branch of an ``if``."""
    return any(all(here.get(one, branch) == branch for one, branch in path.items()) for path in scaled)


def _low_casts(function: Function) -> Iterator[_Found]:
    in_region = [node for node in function.region_nodes if isinstance(node, ast.Call)]
    models = {ast.unparse(call.func) for call in in_region}
    handed = [argument for call in in_region for argument in (*call.args, *(one.value for one in call.keywords))]
    inputs = {ast.unparse(argument) for argument in handed}
    inline = {id(call) for argument in handed for call in calls_in(argument)}
    made = _names_set(function.region_nodes)
    for call, names in _casts(function):
        cast = ast.unparse(call.func).rsplit(".", 1)[-1]
        if names & models:
            [name, *_] = sorted(names & models)
            message = f"{name} is stored in {low_cast(call)} and called under autocast, which casts by itself"
            advice = f"leave .{cast}() away, or: {name}, optimizer = mezzo.torch.prepare({name}, optimizer)"
            yield "half model under autocast", message, advice, call
        elif (names & inputs or (id(call) in inline and not names)) and not _is_activation(call, made):
            message = f"{ast.unparse(call)}: an input is cast to {low_cast(call)} before autocast sees it"
            yield "half input", message, f"hand it over in float32: leave .{cast}() away", call


def _names_set(nodes: list[ast.AST]) -> set[str]:
    stores = (node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return {node.id for node in stores}


def _is_activation(cast: ast.Call, made: set[str]) -> bool:
    """Say whether what is cast was computed in a region, or by a function: then it is no input."""
    if not isinstance(cast.func, ast.Attribute):
        return False
    value = cast.func.value
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    return bool(names & made) or any(called(call) not in _MOVES for call in calls_in(value))


def _casts(function: Function) -> Iterator[tuple[ast.Call, set[str]]]:
    """Go through the casts to lower precision, with the names that the result has."""
    named: dict[int, set[str]] = {}
    for node in function.nodes:
        if isinstance(node, ast.Assign):
            named[id(node.value)] = {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            named[id(node.value)] = {receiver(node.value)}
    for call in function.calls:
        if low_cast(call):
            yield call, named.get(id(call), set())


def _float16_losses(function: Function) -> Iterator[_Found]:
    for call in function.calls:
        name = called(call)
        loss = name.endswith(("_loss", "cross_entropy", "_with_logits", "kl_div")) or name in ("criterion", "loss_fn")
        if not loss and not (name == "scale" and "scaler" in receiver(call).lower()):
            continue
        if any(low_cast(one) == "float16" for argument in call.args for one in calls_in(argument)):
            message = f"{ast.unparse(call.func)} is given float16: the loss ends at 65504 and has 3 digits"
            yield "float16 loss", message, "hand float32 over: .float() instead", call
