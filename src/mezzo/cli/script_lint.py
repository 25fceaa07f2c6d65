"""The lint of a script that was not written to be asked for its models: they are found among the objects that are alive."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

import mezzo.torch
from mezzo.report.findings import Finding
from mezzo.torch.linting.lint import lint, lint_script
from mezzo.torch.watch_mode import unwatched

__all__ = ["ScriptLint", "models_of", "outermost_models"]


def outermost_models() -> list[nn.Module]:
    """Give the modules with parameters that are alive and belong to no other module.

    Returns:
        They, in no order to rely on.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2))
        >>> any(model is net for model in outermost_models())
        True
    """
    # By type: `isinstance` asks an object for its class, and a lazy proxy would do its work then.
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner and any(True for _ in module.parameters())]


def models_of(optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    """Give the outermost modules that have parameters which an optimizer steps.

    Args:
        optimizer: The optimizer.

    Returns:
        The modules.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> models_of(torch.optim.SGD(net.parameters(), lr=0.1))
        [Linear(in_features=2, out_features=2, bias=True)]
    """
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [model for model in outermost_models() if any(id(parameter) in stepped for parameter in model.parameters())]


class ScriptLint:
    """Looks at a script's models and optimizers as they come, and at its source.

    The dtype is that of the parameters if it is a low one; else float16 if a gradient scaler is at work, and without one
    what autocast takes on the device. Nothing of the script is kept alive.

    Attributes:
        findings: What was found, each once.

    Example:
        >>> net, lint = nn.Linear(2, 2), ScriptLint()
        >>> lint.look_at(torch.optim.SGD(net.parameters(), lr=0.1))
        >>> isinstance(lint.findings, tuple)
        True
    """

    def __init__(self) -> None:
        self.findings: tuple[Finding, ...] = ()
        self._looked = False
        self._dtype = torch.get_autocast_dtype("cuda" if torch.cuda.is_available() else "cpu")

    def look_at(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at an optimizer and the models whose parameters it steps.

        Args:
            optimizer: The optimizer.
        """
        models = models_of(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with unwatched():  # reading a buffer is an op, and none of the script's
            self._add(lint(None, optimizer, dtype=self._dtype_for(parameters), device=_device_of(parameters)))
            self._look_at_models(models)

    def finish(self, file: str | None) -> None:
        """Look at the models that are alive, if no optimizer has led to some, and at the script.

        Args:
            file: The script's file, if it has one.
        """
        if not self._looked:
            self._look_at_models(outermost_models())
        if file is not None and Path(file).is_file() and file.endswith(".py"):
            self._add(lint_script(Path(file), self._dtype))

    def _look_at_models(self, models: list[nn.Module]) -> None:
        for model in models:
            self._looked = True
            parameters = [*model.parameters()]
            self._dtype = self._dtype_for(parameters)
            self._add(lint(model, dtype=self._dtype, device=_device_of(parameters)))

    def _dtype_for(self, parameters: Sequence[torch.Tensor]) -> torch.dtype:
        dtypes = {parameter.dtype for parameter in parameters}
        low = next((dtype for dtype in (torch.float16, torch.bfloat16) if dtype in dtypes), None)
        if low is None:
            low = torch.float16 if _scaler_at_work() else torch.get_autocast_dtype(_device_of(parameters))
        return low

    def _add(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(dict.fromkeys((*self.findings, *findings)))


def _device_of(parameters: Sequence[torch.Tensor]) -> str:
    return parameters[0].device.type if parameters else "cpu"


def _scaler_at_work() -> bool:
    kinds = (torch.amp.GradScaler, mezzo.torch.GradScaler)
    scalers = [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]
    return any(scaler.is_enabled() for scaler in scalers)
