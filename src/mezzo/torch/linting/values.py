"""What source code shows of a value: which number a name stands for, and whether it is float32 or no tensor of floats."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cached_property

from .names import constants_of, set_by
from .syntax import called, constant, dtype_named, has_float32, keyword, low_cast, receiver
from .training_source import Function

__all__ = ["Values"]

_Place = tuple[int, int]

_PLAIN_CALLS = frozenset(
    ("len", "int", "float", "round", "range", "ord", "dict", "list", "set", "Counter", "defaultdict")
)
_PLAIN_METHODS = frozenset(
    ("item", "numel", "size", "dim", "tolist", "numpy", "long", "int", "bool", "argmax", "argmin")
)
_PLAIN_MODULES = frozenset(("math", "time", "np", "numpy", "random", "os", "statistics"))
_INTEGERS = frozenset(("int", "long", "bool", "short", "int8", "uint8", "int16", "int32", "int64"))
_FACTORIES = frozenset(
    ("rand", "randn", "zeros", "ones", "full", "empty", "linspace", "logspace", "eye", "hann_window")
)
_LOWERING = frozenset(("to", "type", "type_as", "view_as_complex", "half", "bfloat16"))
"""Methods behind which a value is no longer known to be float32."""
_PRODUCTS = frozenset(
    (
        *(
            "matmul",
            "mm",
            "bmm",
            "addmm",
            "baddbmm",
            "einsum",
            "linear",
            "bilinear",
            "mv",
            "dot",
            "addmv",
            "chain_matmul",
        ),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("scaled_dot_product_attention", "multi_dot", "tensordot", "inner"),
    )
)
"""Functions that autocast computes in lower precision whatever comes."""


class Values:
    r"""What a function's text shows of its values. The text is followed from top to bottom; loops and branches are not.

    Args:
        function: The function.
        outer: Numbers that names outside of it stand for.

    Example:
        >>> tree = ast.parse("def f(x, eps=1e-8):\n    h = x.float()\n    return h + eps")
        >>> from mezzo.torch.linting.training_source import functions_in
        >>> [*_, function] = functions_in(tree)
        >>> values, added = Values(function, {}), tree.body[0].body[1].value
        >>> values.number(added.right), values.wide(added.left), values.plain(added.left)
        (1e-08, True, False)
    """

    def __init__(self, function: Function, outer: Mapping[str, float]) -> None:
        self._function = function
        self._outer = outer

    @cached_property
    def _events(self) -> dict[str, list[tuple[_Place, ast.expr | None]]]:
        """Where each name is set, and to what; None if that is not an expression of its own."""
        found: dict[str, list[tuple[_Place, ast.expr | None]]] = {}
        spans: dict[str, list[tuple[_Place, _Place]]] = {}
        for node in self._function.nodes:
            for name, value in set_by(node):
                found.setdefault(name, []).append((_end(node), value))
                spans.setdefault(name, []).append((_start(node), _end(node)))
            if isinstance(node, ast.AugAssign):  # in place: the dtype stays
                spans.setdefault(ast.unparse(node.target), []).append((_start(node), _end(node)))
        for node in self._function.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                at = _start(node)
                if not any(start <= at <= end for start, end in spans.get(node.id, ())):
                    found.setdefault(node.id, []).append((_end(node), None))
        return {name: sorted(events, key=lambda event: event[0]) for name, events in found.items()}

    @cached_property
    def _stores(self) -> list[str]:
        return [
            node.id for node in self._function.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]

    @cached_property
    def _members(self) -> dict[str, float]:
        """The numbers of the class, but of those that a method sets for an object."""
        owner = self._function.owner
        if owner is None:
            return {}
        set_later = {
            node.attr for node in ast.walk(owner) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        return {name: number for name, number in constants_of(owner.body).items() if name not in set_later}

    @cached_property
    def _parameters(self) -> dict[str, ast.arg]:
        given = self._function.arguments
        found = [] if given is None else [*given.posonlyargs, *given.args, *given.kwonlyargs]
        return {one.arg: one for one in found}

    @cached_property
    def _defaults(self) -> dict[str, ast.expr | None]:
        given = self._function.arguments
        if given is None:
            return {}
        positional = [*given.posonlyargs, *given.args]
        last = positional[len(positional) - len(given.defaults) :]
        found: dict[str, ast.expr | None] = {one.arg: value for one, value in zip(last, given.defaults, strict=True)}
        found.update({one.arg: value for one, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)})
        return found

    def number(self, node: ast.AST | None) -> float | None:
        """Work out a number that is written down, or that a name stands for that is set once.

        Args:
            node: The expression.

        Returns:
            The number; None if the expression is something else.
        """
        match node:
            case ast.Name(id=name):
                return self._named(name)
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in self._owners:
                return self._members.get(name)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                number = self.number(inner)
                return None if number is None else -number
            case ast.Call(args=[first, *_]) if called(node) == "tensor" and receiver(node) == "torch":
                return None if has_float32(keyword(node, "dtype")) else self.number(first)
        return constant(node)

    @cached_property
    def _owners(self) -> tuple[str, ...]:
        owner = self._function.owner
        return ("self", "cls", *([*self._parameters][:1]), owner.name) if owner is not None else ()

    def _named(self, name: str) -> float | None:
        if name in self._parameters:
            return None if name in self._stores else constant(self._defaults.get(name))
        if name not in self._stores:
            return self._outer.get(name)
        events = self._events.get(name, [])
        return constant(events[0][1]) if events and self._stores.count(name) == 1 else None

    def wide(self, node: ast.AST | None, *, made: bool = True) -> bool:
        """Say whether an expression asks for float32, or works on what was cast to it before.

        Args:
            node: The expression.
            made: Whether what a function such as ``torch.rand`` makes counts, too.

        Returns:
            Whether it is so. What goes through a matrix product or a module does not stay wide under autocast.
        """
        return has_float32(node) or (node is not None and self._wide(node, _start(node), made))

    def _wide(self, node: ast.AST, at: _Place, made: bool) -> bool:
        match node:
            case ast.Name(id=name):
                place, value = self._last(name, at)
                return value is not None and self._wide(value, place, made)
            case ast.BinOp(left=left, op=kind, right=right) if not isinstance(kind, ast.MatMult):
                return self._wide(left, at, made) or self._wide(right, at, made)
            case ast.UnaryOp(operand=inner) | ast.Subscript(value=inner):
                return self._wide(inner, at, made)
            case ast.IfExp(body=body, orelse=other):
                return self._wide(body, at, made) and self._wide(other, at, made)
            case ast.Call():
                return self._wide_call(node, at, made)
        return False

    def _wide_call(self, call: ast.Call, at: _Place, made: bool) -> bool:
        name, on = called(call), receiver(call)
        if _casts_up(call):
            return True
        if low_cast(call) or name in _LOWERING or name in _PRODUCTS:
            return False
        if on == "torch" and name in _FACTORIES:
            return made and keyword(call, "dtype") is None
        if on.split(".")[-1] in ("torch", "F", "functional"):
            return any(self._wide(argument, at, made) for argument in call.args)
        return isinstance(call.func, ast.Attribute) and self._wide(call.func.value, at, made)

    def plain(self, node: ast.AST) -> bool:
        """Say whether an expression is a number of Python's, of NumPy's or an integer, which autocast does not round.

        Args:
            node: The expression.

        Returns:
            Whether the text shows it to be one.
        """
        return self._plain(node, _start(node))

    def _plain(self, node: ast.AST, at: _Place) -> bool:
        match node:
            case ast.Constant() | ast.Dict() | ast.List() | ast.DictComp() | ast.ListComp():
                return True
            case ast.Name(id=name):
                return self._plain_name(name, at)
            case ast.BinOp(left=left, right=right):
                return self._plain(left, at) and self._plain(right, at)
            case ast.UnaryOp(operand=inner) | ast.Subscript(value=inner):
                return self._plain(inner, at)
            case ast.Attribute(attr="shape" | "ndim"):
                return True
            case ast.Call():
                return self._plain_call(node, at)
        return False

    def _plain_name(self, name: str, at: _Place) -> bool:
        place, value = self._last(name, at)
        if value is not None:
            return self._plain(value, place)
        hint = self._parameters[name].annotation if name in self._parameters and name not in self._stores else None
        return isinstance(hint, ast.Name) and hint.id in ("int", "float")

    def _plain_call(self, call: ast.Call, at: _Place) -> bool:
        name, on = called(call), receiver(call)
        if dtype_named(keyword(call, "dtype") or ast.Constant(None)) in _INTEGERS:
            return True
        if not isinstance(call.func, ast.Attribute):
            both = name in ("min", "max", "abs", "sum") and bool(call.args)
            return name in _PLAIN_CALLS or (both and all(self._plain(argument, at) for argument in call.args))
        if on.split(".")[0] in _PLAIN_MODULES or name in _PLAIN_METHODS:
            return True
        if name in ("to", "type"):
            return any(dtype_named(argument) in _INTEGERS for argument in call.args)
        return name != "float" and self._plain(call.func.value, at)

    def _last(self, name: str, at: _Place) -> tuple[_Place, ast.expr | None]:
        """Give what a name was set to last before a place, and where that stands."""
        before = [value for place, value in self._events.get(name, ()) if place <= at]
        value = before[-1] if before else None
        return (at, None) if value is None else (_start(value), value)


def _casts_up(call: ast.Call) -> bool:
    if has_float32(keyword(call, "dtype")):
        return True
    if not isinstance(call.func, ast.Attribute):
        return False
    return call.func.attr in ("float", "double") or (
        call.func.attr in ("to", "type") and any(has_float32(argument) for argument in call.args)
    )


def _start(node: ast.AST) -> _Place:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _end(node: ast.AST) -> _Place:
    return getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0)
