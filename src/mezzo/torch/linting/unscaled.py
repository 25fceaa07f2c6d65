"""Training in float16 with no gradient scaler, as source code shows it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .syntax import called, dtype_named, is_autocast, keyword, receiver

__all__ = ["unscaled_backward"]


def unscaled_backward(tree: ast.AST) -> Iterator[ast.Call]:
    r"""Find the first backward pass of code that opens a float16 region and scales no loss.

    Only code that holds both the region and ``loss.backward()`` is judged; what a framework calls, as in
    ``engine.backward(loss)``, scales for itself. Any scaler, or a number called loss scale, counts as one.

    Args:
        tree: The code, of a file or of a function.

    Yields:
        The call, or nothing.

    Source: PyTorch's page on automatic mixed precision, "Gradient Scaling".

    Example:
        >>> code = "with torch.autocast('cuda', dtype=torch.float16):\n    loss = net(x).sum()\nloss.backward()"
        >>> [call.lineno for call in unscaled_backward(ast.parse(code))]
        [3]
    """
    nodes = [*ast.walk(tree)]
    if not any(_is_float16_region(node) for node in nodes) or any(_scales(node) for node in nodes):
        return
    calls = [node for node in nodes if isinstance(node, ast.Call) and called(node) == "backward" and not node.args]
    bare = [call for call in calls if receiver(call) not in ("", "super()")]
    yield from sorted(bare, key=lambda call: call.lineno)[:1]


def _is_float16_region(node: ast.AST) -> bool:
    if not isinstance(node, ast.withitem) or not is_autocast(node) or not isinstance(node.context_expr, ast.Call):
        return False
    call = node.context_expr
    dtype = keyword(call, "dtype") or (call.args[1] if len(call.args) > 1 else None)
    if dtype is not None:
        return dtype_named(dtype) == "float16"
    device = call.args[0] if call.args else keyword(call, "device_type")
    return isinstance(device, ast.Constant) and str(device.value).startswith(
        "cuda"
    )  # whose dtype is float16 if not told


def _scales(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)) | ast.alias(name=name):
            pass
        case ast.Attribute(attr=name):
            if name == "scale":
                return True
        case _:
            return False
    name = name.lower()
    return "scaler" in name or ("loss" in name and "scal" in name)
