"""The real run: the same programs with regions, threads, decorators and PyTorch's own kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

import mezzo.torch
from mezzo.torch.keeping import keep_casts

from . import program as p
from .interpreter import Interpreter, State, run_in_thread
from .leftovers import leftovers
from .operations import Operation

__all__ = ["Runner"]


class Runner(Interpreter):
    """Runs a program for real.

    Args:
        program: The program.
    """

    def __init__(self, program: p.Program) -> None:
        super().__init__(program)
        self._casts_may_be_stale = _changes_what_casts_depend_on(program)

    def state(self) -> State:
        return State(
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            mezzo.torch.active_policy("cpu"),
        )

    def apply(self, operation: Operation, args: list[Tensor | None]) -> Tensor:
        if self._casts_may_be_stale and not mezzo.torch.active_policy("cpu").repairs:
            # Without repairs PyTorch's cache serves what it has, fresh or not; that is not to be compared.
            torch.clear_autocast_cache()
        return operation.call(*args)

    def opened(self, region: p.Region) -> AbstractContextManager[Any]:
        dtype = None if region.dtype is None else getattr(torch, region.dtype)
        options: dict[str, Any] = {"dtype": dtype, "enabled": region.enabled, "cache_enabled": region.cache_enabled}
        if region.kind == "torch":
            return torch.autocast("cpu", **options)
        policy = None if region.policy is None else region.policy.policy()
        if region.policy is not None and not region.policy.rules and region.policy.base != "everything":
            return mezzo.torch.autocast("cpu", **options, policy=region.policy.base)
        return mezzo.torch.autocast("cpu", **options, policy=policy)

    def region(self, region: p.Region) -> None:
        made: Any = self.opened(region)
        if region.how == "with":
            with made:
                self.block(region.body)
            return

        @made
        def run(depth: int) -> None:
            self.block(region.body)
            if depth:
                run(depth - 1)

        run(1 if region.how == "recursive" else 0)

    def generator(self, generator: p.Generator) -> None:
        made: Any = self.opened(generator.region)

        @made
        def steps() -> Iterator[None]:
            for step in generator.steps:
                self.block(step)
                yield

        def loop() -> None:
            for _ in steps():
                self.block(generator.between)

        self.surround(generator.around, loop)

    def thread(self, thread: p.Thread) -> None:
        def body() -> None:
            self.block(thread.body)

        work = mezzo.torch.bind(body) if thread.bound else body

        def run() -> None:
            clean = leftovers()
            try:
                work()
            finally:
                assert leftovers() == clean, f"a thread is left with {leftovers()}"

        run_in_thread(run)

    def keeping(self) -> AbstractContextManager[Any]:
        return keep_casts()


def _changes_what_casts_depend_on(program: p.Program) -> bool:
    statements = p.statements_of(program.body)
    if any(isinstance(statement, p.Update | p.Grad | p.KeepCasts) for statement in statements):
        return True
    regions = [statement for statement in statements if isinstance(statement, p.Region)]
    for statement in statements:
        if isinstance(statement, p.Generator):
            regions += [region for region in (statement.region, statement.around) if region is not None]
    return len({region.dtype for region in regions}) > 1
