"""`lint`: what in a model, an optimizer and source code does not go with mixed precision, found without running anything."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType

import torch
from torch import nn
from torch.optim import Optimizer

from mezzo.errors import DtypeError
from mezzo.policy import Policy
from mezzo.report.findings import Finding
from mezzo.torch.ops import check_device
from mezzo.torch.policies import get_default_policy

from .hardware import slow_reason
from .modules import module_findings
from .names import numbers_in
from .optimizers import optimizer_findings
from .reach import globals_of
from .source import source_findings

__all__ = ["Source", "lint", "lint_script"]

Source = str | Path | ModuleType | type | Callable[..., object]
"""Where code is: a file, an imported module, a class, or a function."""

_DTYPES = (torch.float16, torch.bfloat16)


def lint(
    model: nn.Module | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    dtype: torch.dtype = torch.float16,
    device: str | torch.device | None = None,
    source: Source | Sequence[Source] = (),
) -> tuple[Finding, ...]:
    """Find what does not go with mixed precision, before anything runs.

    Looked for are: constants that a lower precision does not hold (the eps of norms and of optimizers, -1e9 of masks, in
    attributes, buffers and code), losses in float16, binary cross-entropy after a sigmoid, logarithms of a sigmoid or a
    softmax, ``.half()`` or ``.bfloat16()`` on a model or its inputs, a backward pass inside of a region, one of a float16
    region with no scaler, clipping of gradients that are still scaled, and a dtype that this machine has no fast kernels
    for. What only shows when it runs, `mezzo.torch.explain` finds.

    Code is read, not run; what is not written in it, such as a number that comes out of a configuration, is not seen. Code
    of PyTorch and of mezzo is left out. Buffers are read, which on a GPU waits for it. Nothing is changed; not to be called
    while another thread changes the model.

    Args:
        model: The model; also the code of its classes is looked at, and of the functions that it calls by name.
        optimizer: One optimizer or several.
        dtype: The dtype of the region that it is to run in: ``torch.float16`` or ``torch.bfloat16``.
        device: The device type that it is to run on. None takes that of the model's parameters, else ``"cuda"`` if there is
            one, else ``"cpu"``.
        source: More code to look at, such as the function that trains, or the path of a script.

    Returns:
        Findings, each with a cure as ``advice``; the same found several times in one place is one with its ``count``.

    Raises:
        TypeError: An argument is of another type.
        DtypeError: ``dtype`` is neither of the two.
        DeviceError: There is no autocast for the device.
        OSError: A path is no file that can be read, or the code of a function is in no file.
        SyntaxError: A file is not Python.

    Example:
        >>> weight = nn.Parameter(torch.zeros(3, dtype=torch.float16))
        >>> for finding in lint(optimizer=torch.optim.Adam([weight])):
        ...     if finding.kind == "eps lost":
        ...         print(finding)
        eps=1e-08 of Adam is 0 in float16, whose smallest number is 6e-08: a gradient of 0 gives 0 / 0
    """
    if dtype not in _DTYPES:
        msg = f"lint looks at torch.float16 and torch.bfloat16, got dtype={dtype!r}; pass the dtype of your region."
        raise DtypeError(msg)
    if model is not None and not isinstance(model, nn.Module):
        msg = f"lint takes a torch.nn.Module as model, got {type(model).__name__}; pass code and functions as source=."
        raise TypeError(msg)
    optimizers = _optimizers(optimizer)
    kind = check_device(str(device) if device is not None else _device_of(model))
    word = str(dtype).removeprefix("torch.")
    return Finding.merge(_all(model, optimizers, word, kind, _sources(source)))


def lint_script(file: Path, dtype: torch.dtype) -> tuple[Finding, ...]:
    """Look at a script as `lint` does at a source, but for constants only where a model computes.

    A script also has numbers that are for no model: sums of a metric, times, data in NumPy. So constants are looked for
    in regions, in the methods of modules, and in the functions that these call by name.

    Args:
        file: The script.
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Returns:
        Findings, as of `lint`.

    Raises:
        OSError: The file cannot be read.
        SyntaxError: It is not Python.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "train.py"
        ...     _ = file.write_text("def accuracy(right, seen): return right / (seen + 1e-9)")
        ...     [finding.kind for finding in lint_script(file, torch.float16) if finding.kind != "slow dtype"]
        []
    """
    word = str(dtype).removeprefix("torch.")
    return Finding.merge(_all(None, [], word, _device_of(None), [file], script=True))


def _all(
    model: nn.Module | None,
    optimizers: list[Optimizer],
    dtype: str,
    device: str,
    sources: list[Source],
    *,
    script: bool = False,
) -> Iterator[Finding]:
    policy = get_default_policy().on(device)

    def in_float32(op: str) -> bool:
        return _is_float32(policy, op, dtype)

    if model is not None:
        yield from module_findings(model, dtype, in_float32)
    yield from optimizer_findings(optimizers)
    for one in sources:
        tree, file = _tree(one)
        outer = {} if isinstance(one, str | Path) else numbers_in(globals_of(_code_object(one)))
        yield from source_findings(tree, file, dtype, in_float32=in_float32, outer=outer, script=script)
    if reason := slow_reason(dtype, device):
        other = next((one for one in ("bfloat16", "float16") if one != dtype and not slow_reason(one, device)), "")
        cure = f"mezzo.torch.autocast({device!r}, dtype=torch.{other})" if other else "run without autocast here"
        yield Finding("slow dtype", f"matrix products in {dtype} on {device} are slow here: {reason}", cure)


def _is_float32(policy: Policy, op: str, dtype: str) -> bool:
    return str(policy.rule_of(op, dtype)).startswith("fp32")


def _device_of(model: nn.Module | None) -> str:
    first = next(model.parameters(), None) if model is not None else None
    if first is not None and not first.is_meta:
        return first.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


def _optimizers(given: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    found = [] if given is None else [given] if isinstance(given, Optimizer) else _items(given)
    for one in found:
        if not isinstance(one, Optimizer):
            msg = f"lint takes a torch.optim.Optimizer, or several, as optimizer, got {type(one).__name__}."
            raise TypeError(msg)
    return found


def _items(given: Iterable[Optimizer]) -> list[Optimizer]:
    return list(given) if isinstance(given, Iterable) else [given]


def _sources(given: Source | Sequence[Source]) -> list[Source]:
    found: list[Source] = list(given) if isinstance(given, list | tuple) else [given]  # type: ignore[list-item]
    for one in found:
        if not isinstance(one, str | Path | ModuleType | type) and not callable(one):
            msg = f"lint takes files, modules, classes and functions as source, got {type(one).__name__}."
            raise TypeError(msg)
    return found


def _tree(source: Source) -> tuple[ast.AST, str]:
    if isinstance(source, str | Path):
        return ast.parse(Path(source).read_text(encoding="utf-8"), str(source)), str(source)
    code = _code_object(source)
    lines, start = inspect.getsourcelines(code)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, max(start - 1, 0))
    return tree, inspect.getsourcefile(code) or ""


def _code_object(source: object) -> ModuleType | type | FunctionType | MethodType | CodeType:
    found = inspect.unwrap(source) if callable(source) else source
    if isinstance(found, ModuleType | type | FunctionType | MethodType):
        return found
    return type(found)  # an object that can be called: its class
