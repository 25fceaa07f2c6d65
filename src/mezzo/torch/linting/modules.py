"""What a model's parameters, buffers and settings show before it runs: low weights, constants that a dtype does not hold."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType

import torch
from torch import Tensor, nn

from mezzo.report.findings import Finding
from mezzo.torch.masters.params import master_of
from mezzo.torch.masters.preparation import preparation_of
from mezzo.torch.module_names import named_modules

from .constants import becomes_infinite, smallest, vanishes
from .names import numbers_in
from .places import common_name, listed, setting_for
from .reach import functions_called, globals_of, is_ours
from .source import source_findings

__all__ = ["module_findings"]

_EPS = re.compile(r"(^|_)(eps|epsilon|tiny)$")
_MASK = re.compile(r"mask|fill|neg_?inf")
_UPCASTS = re.compile(r"\.float\(\)|float32")
_EPS_OPS = {nn.CosineSimilarity: "aten::cosine_similarity", nn.PoissonNLLLoss: "aten::poisson_nll_loss"}
"""Modules of PyTorch's whose eps is not added inside of a kernel that computes in float32."""

Named = list[tuple[str, nn.Module]]


def module_findings(model: nn.Module, dtype: str, in_float32: Callable[[str], bool]) -> Iterator[Finding]:
    """Look through the modules of a model. Nothing of it is run; buffers are read.

    Args:
        model: The model.
        dtype: The lower precision that it is to run in, ``"float16"`` or ``"bfloat16"``.
        in_float32: Says whether a rule has an op computed in float32 under autocast.

    Yields:
        Findings whose path is the module's name, with ``*`` for what differs among like ones.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
        >>> [finding.kind for finding in module_findings(net.half(), "float16", lambda op: False)]
        ['half weights']
    """
    named: dict[int, tuple[str, nn.Module]] = {}
    for found in named_modules(model):
        named.setdefault(id(found.module), (found.name, found.module))
    modules = list(named.values())
    yield from _low_weights(model)
    yield from _numbers(modules, dtype, in_float32)
    yield from _buffers(modules, dtype)
    yield from _losses_of_probabilities(modules)
    yield from _sources(modules, dtype, in_float32)


def _low_weights(model: nn.Module) -> Iterator[Finding]:
    if any(preparation_of(module) is not None for module in model.modules()):
        return  # `prepare` has chosen which are low, and how their updates are kept
    for dtype in (torch.float16, torch.bfloat16):
        found = model.named_parameters()
        low = [name for name, one in found if one.dtype is dtype and one.requires_grad and master_of(one) is None]
        if low:
            word = str(dtype).removeprefix("torch.")
            message = (
                f"{len(low)} parameters are stored in {word} ({listed(low)}): updates of low weights are rounded, small "
                "ones to nothing; under autocast weights stay in float32, and ops cast them"
            )
            advice = "model.float(), or: model, optimizer = mezzo.torch.prepare(model, optimizer)"
            yield Finding("half weights", message, advice, None, (common_name(low[:1]),), len(low))


def _numbers(modules: Named, dtype: str, in_float32: Callable[[str], bool]) -> Iterator[Finding]:
    """Look at the numbers that modules have as attributes, like modules with the same number together."""
    groups: dict[tuple[str, str, float, str], list[str]] = {}
    for name, module in modules:
        for attribute, value in vars(module).items():
            if isinstance(value, float) and (kind := _kind(module, attribute, value, dtype, in_float32)):
                groups.setdefault((kind, attribute, value, type(module).__name__), []).append(name)
    for (kind, attribute, value, owner), names in groups.items():
        name = common_name(names)
        subject = f"{attribute}={value:g} of {owner} {name!r}"
        yield _constant_finding(kind, subject, value, dtype, name, len(names))


def _kind(module: nn.Module, attribute: str, value: float, dtype: str, in_float32: Callable[[str], bool]) -> str:
    # An infinite bound cuts nothing off, as the finite one does.
    bound = isinstance(module, nn.Hardtanh)
    if becomes_infinite(value, dtype) and not bound and (value < 0 or _MASK.search(attribute)):
        return "mask overflow"
    if value > 0 and _EPS.search(attribute) and vanishes(value, dtype) and not _computes_wide(module, in_float32):
        return "eps lost"
    return ""


def _computes_wide(module: nn.Module, in_float32: Callable[[str], bool]) -> bool:
    """Say whether a module works in float32 whatever comes: PyTorch's kernels of norms do, and code that casts up."""
    if type(module).forward.__module__.startswith("torch."):
        op = next((op for kind, op in _EPS_OPS.items() if isinstance(module, kind)), "")
        return not op or in_float32(op)
    try:
        return bool(_UPCASTS.search(inspect.getsource(type(module).forward)))
    except (OSError, TypeError):
        return False


def _constant_finding(kind: str, subject: str, value: float, dtype: str, name: str, count: int) -> Finding:
    if kind == "eps lost":
        message = f"{subject} is 0 in {dtype}, whose smallest number is {smallest(dtype):.1g}"
        advice = f"{setting_for(name)}; or take a number that {dtype} holds, such as 1e-4"
    else:
        message = f"{subject} is {'-' if value < 0 else ''}inf in {dtype}"
        advice = "take torch.finfo(x.dtype).min where it is used, x being what is masked"
    return Finding(kind, message, advice, None, (name,) if name else (), count)


def _buffers(modules: Named, dtype: str) -> Iterator[Finding]:
    groups: dict[tuple[str, float], list[str]] = {}
    for name, module in modules:
        for own, buffer in module.named_buffers(recurse=False):
            lowest = _lowest(buffer)
            if becomes_infinite(lowest, dtype):
                groups.setdefault((own, lowest), []).append(name)
    for (own, lowest), names in groups.items():
        name = common_name(names)
        subject = f"the buffer {f'{name}.{own}' if name else own!s} has {lowest:g}, which"
        yield _constant_finding("mask overflow", subject, lowest, dtype, name, len(names))


def _lowest(buffer: Tensor) -> float:
    """Give the lowest finite number in a buffer; 0 if there is none to be read."""
    if buffer.is_meta or not buffer.is_floating_point() or buffer.layout is not torch.strided or not buffer.numel():
        return 0.0
    values = buffer.detach()
    return float(torch.where(torch.isfinite(values), values, torch.zeros_like(values)).min())


def _losses_of_probabilities(modules: Named) -> Iterator[Finding]:
    for name, module in modules:
        if isinstance(module, nn.BCELoss):
            message = (
                f"{type(module).__name__} {name!r} takes the logarithm of a sigmoid, which is 0 or 1 for large logits"
            )
            advice = "nn.BCEWithLogitsLoss(), with no sigmoid before it"
            yield Finding("bce after sigmoid", message, advice, None, (name,) if name else ())


def _sources(modules: Named, dtype: str, in_float32: Callable[[str], bool]) -> Iterator[Finding]:
    """Look at the code of each class once, and at that of the functions that it calls; not at PyTorch's and mezzo's."""
    names: dict[type | FunctionType, list[str]] = {}
    for name, module in modules:
        for kind in type(module).__mro__:
            if issubclass(kind, nn.Module) and not is_ours(kind.__module__):
                names.setdefault(kind, []).append(name)
    for kind in [one for one in names if isinstance(one, type)]:
        for function in functions_called(kind):
            names.setdefault(function, names[kind])
    for code, found in names.items():
        name = common_name(found)
        try:
            file = inspect.getsourcefile(code)
            lines, start = inspect.getsourcelines(code)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError):
            continue
        ast.increment_lineno(tree, start - 1)
        path = (name,) if name else ()
        yield from source_findings(
            tree, file or "", dtype, path=path, in_float32=in_float32, outer=numbers_in(globals_of(code))
        )
