"""What an optimizer's settings show: an eps that is 0 in the dtype in which its steps are computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.optim import Optimizer

from mezzo.report.findings import Finding

from .constants import smallest, vanishes

__all__ = ["optimizer_findings"]


def optimizer_findings(optimizers: Iterable[Optimizer]) -> Iterator[Finding]:
    """Look at the parameter groups of optimizers.

    An optimizer computes in the dtype of its parameters, unless it is a fused one, which computes in float32. With float32
    masters, as `mezzo.torch.prepare` gives them, the parameters that it has are those.

    Args:
        optimizers: The optimizers.

    Yields:
        A finding of the kind ``"eps lost"`` for each eps and dtype.

    Source: pytorch/pytorch issue 147437 (Adam's eps in float16).

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        >>> for finding in optimizer_findings([torch.optim.Adam([weight])]):
        ...     print(finding)
        eps=1e-08 of Adam is 0 in float16, whose smallest number is 6e-08: a gradient of 0 gives 0 / 0
    """
    for optimizer in optimizers:
        lost: dict[tuple[float, str], int] = {}
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if not isinstance(eps, float) or group.get("fused"):
                continue
            for parameter in group["params"]:
                dtype = str(parameter.dtype).removeprefix("torch.")
                if dtype in ("float16", "bfloat16") and vanishes(eps, dtype):
                    lost[eps, dtype] = lost.get((eps, dtype), 0) + 1
        for (eps, dtype), count in lost.items():
            message = (
                f"eps={eps:g} of {type(optimizer).__name__} is 0 in {dtype}, whose smallest number is "
                f"{smallest(dtype):.1g}: a gradient of 0 gives 0 / 0"
            )
            advice = (
                "float32 masters: model, optimizer = mezzo.torch.prepare(model, optimizer); or fused=True, or eps=1e-4"
            )
            yield Finding("eps lost", message, advice, None, (), count)
