"""The work itself: for a case and a side, a loop to be timed and a probe that says what it computes.

This module is imported by workers only. mezzo is imported inside the functions that need it: a process that
plays PyTorch's side must never load it, since kernels are process-wide.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.apex_front import apex_work
from benchmarks.beside import beside_work
from benchmarks.calls import LOW, OPS, RULES, Call
from benchmarks.models import blocks, encoder
from benchmarks.prepared import prepared_work
from benchmarks.steps import scaler_work
from benchmarks.watched import watched_work
from benchmarks.work import Work, describe

if TYPE_CHECKING:
    from benchmarks.cases import Case
    from benchmarks.pairing import Side

Region = Callable[[], AbstractContextManager[Any]]


def build(case: Case, side: Side) -> Work:
    """Prepare the work of one side; seeded, so that every side computes the same numbers."""
    torch.manual_seed(0)
    builders = {
        "model": _model_work,
        "inference": _inference_work,
        "op": _op_work,
        "rule": _rule_work,
        "enter": _enter_work,
        "scaler": scaler_work,
        "beside": beside_work,
        "prepare": prepared_work,
        "apex": apex_work,
        "watched": watched_work,
    }
    return builders[case.workload](case, side)


def _mezzo_region(policy: str | None) -> Region:
    from mezzo.torch import autocast

    return lambda: autocast("cpu", dtype=LOW, policy=policy)


def _torch_region() -> Region:
    return lambda: torch.autocast("cpu", dtype=LOW)


_MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "blocks": blocks,
    "encoder-1x32": lambda: encoder(1, 32),
    "encoder-4x128": lambda: encoder(4, 128),
}


def _model_work(case: Case, side: Side) -> Work:
    model, inputs = _MODELS[case.subject]()
    region = _mezzo_region(case.policy) if side == "mezzo" else _torch_region()
    if side == "mezzo" and case.registers_first:
        with _mezzo_region("unified")():
            model(inputs)

    def loop(count: int) -> None:
        for _ in repeat(None, count):
            model.zero_grad(set_to_none=True)
            with region():
                output = model(inputs)
            output.float().square().mean().backward()

    def probe() -> tuple[str, float]:
        loop(1)
        gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        return describe(torch.cat(gradients))

    return Work(loop, probe)


def _inference_work(case: Case, side: Side) -> Work:
    """Ten regions in a row, as a server has them; on mezzo's side in one `keep_casts`."""
    model, inputs = encoder(1, 1)
    model.eval()
    if side == "mezzo":
        from mezzo.torch import keep_casts

        region, around = _mezzo_region(case.policy), keep_casts
    else:
        region, around = _torch_region(), nullcontext

    def ten() -> Tensor:
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(case.subject != "slow-path")
        try:
            with torch.no_grad(), around():
                for _ in range(10):
                    with region():
                        output = model(inputs)
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
        return output

    def loop(count: int) -> None:
        for _ in repeat(None, count):
            ten()

    return Work(loop, lambda: describe(ten()))


def _served_by_mezzo(policy: str | None) -> Region:
    from mezzo.torch.kernels import serve_all

    def region() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(_mezzo_region(policy)())
        stack.enter_context(serve_all("cpu"))
        return stack

    return region


def _op_work(case: Case, side: Side) -> Work:
    if side != "mezzo":
        return _call_work(OPS[case.subject](), _torch_region())
    work = _call_work(OPS[case.subject](), _served_by_mezzo(case.policy))
    return Work(work.loop, _checked(work.probe, case.subject))


def _checked(probe: Callable[[], tuple[str, float]], op: str) -> Callable[[], tuple[str, float]]:
    """Let the probe fail where mezzo has no kernel for the op: PyTorch would be timed against itself."""

    def checked() -> tuple[str, float]:
        from mezzo.torch.kernels import installed_kernels

        result = probe()
        served = {name.partition("::")[2].partition(".")[0] for name in installed_kernels("cpu")}
        if op not in served:
            message = f"mezzo serves no {op} on cpu here; it serves: {', '.join(sorted(served)) or 'nothing'}."
            raise RuntimeError(message)
        return result

    return checked


def _call_work(call: Call, region: Region) -> Work:
    """Many calls in one region: what a call costs, without what the region costs."""

    def loop(count: int) -> None:
        with region():
            for _ in repeat(None, count):
                call()

    def probe() -> tuple[str, float]:
        with region():
            return describe(call())

    return Work(loop, probe)


def _rule_work(case: Case, side: Side) -> Work:
    by_rule, by_hand = RULES[case.subject]()
    if side != "mezzo":
        return _call_work(by_hand, nullcontext)
    work = _call_work(by_rule, _mezzo_region(case.policy))
    return Work(work.loop, _checked(work.probe, case.subject))


def _enter_work(case: Case, side: Side) -> Work:
    options: dict[str, Any] = {"dtype": LOW}
    autocast: Any = torch.autocast
    if side == "mezzo":
        from mezzo.torch import autocast as mezzo_autocast

        autocast = mezzo_autocast
        options["policy"] = case.policy
    loop = _enter_new(autocast, options) if case.subject == "new" else _enter_again(autocast("cpu", **options))

    def probe() -> tuple[str, float]:
        with autocast("cpu", **options):
            return str(torch.get_autocast_dtype("cpu")), float(torch.is_autocast_enabled("cpu"))

    return Work(loop, probe)


def _enter_new(autocast: Any, options: dict[str, Any]) -> Callable[[int], None]:
    def loop(count: int) -> None:
        for _ in repeat(None, count):
            with autocast("cpu", **options):
                pass

    return loop


def _enter_again(region: AbstractContextManager[Any]) -> Callable[[int], None]:
    def loop(count: int) -> None:
        for _ in repeat(None, count):
            with region:
                pass

    return loop
