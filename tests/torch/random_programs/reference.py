"""The reference: what a program has to give, computed without autocast, by explicit casts.

It follows the documented semantics and nothing else: which state is in force (`docs/amp.md`, `docs/scopes.md`), by which
rule an op runs (`mezzo.Policy.rule_of`), in which dtypes its inputs reach it (`mezzo.decision.input_dtypes`), and how a
call that fails over dtypes is mended. It keeps no casts, so weights are always what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from mezzo import CastPolicy, Policy, builtin_policy
from mezzo.decision import eligible, input_dtypes
from mezzo.errors import BannedOpError

from . import program as p
from .interpreter import Interpreter, Note, State, run_in_thread
from .operations import Operation

__all__ = ["Reference"]

Args = list[Tensor | None]

_NOT_OVER_DTYPES = ("nference tensor", "leaf Variable", "nference Tensor")
"""What errors say that no cast cures; shapes are always right here."""


@dataclass(frozen=True)
class _InForce:
    """The state of a thread; the policy is that of the innermost region of mezzo's, None outside of any."""

    enabled: bool = False
    low: torch.dtype = torch.bfloat16
    cache_enabled: bool = True
    policy: Policy | None = None


class Reference(Interpreter):
    """Interprets a program without autocast.

    Args:
        program: The program.
        real: The notes of the real run. They are looked at where PyTorch's own behaviour is not fixed: under rules without
            repairs, its kernel for ``promote`` refuses some mixtures that mezzo's, if it serves the op by then, takes.
    """

    def __init__(self, program: p.Program, real: Sequence[Note]) -> None:
        super().__init__(program)
        self._real = real
        self._here = _InForce()
        self._default = None if program.default_policy is None else program.default_policy.policy()
        self._cast_grads: dict[str, list[Tensor]] = {}

    # What is in force

    def state(self) -> State:
        here = self._here
        return State(here.enabled, here.low, here.cache_enabled, self._policy())

    def _policy(self) -> Policy:
        return self._here.policy or self._default or builtin_policy("torch")

    @contextmanager
    def _with(self, inside: _InForce) -> Iterator[None]:
        before, self._here = self._here, inside
        try:
            yield
        finally:
            self._here = before

    def _made(self, region: p.Region) -> p.Region:
        """Fill in what a region reads when it is made: dtype and cache flag."""
        here = self._here
        return replace(
            region,
            dtype=region.dtype or str(here.low).removeprefix("torch."),
            cache_enabled=here.cache_enabled if region.cache_enabled is None else region.cache_enabled,
        )

    def _entered(self, made: p.Region) -> AbstractContextManager[None]:
        policy = self._here.policy
        if made.kind == "mezzo":
            given = None if made.policy is None else made.policy.policy()
            policy = given or policy or self._default or builtin_policy("default")
        assert made.cache_enabled is not None
        return self._with(_InForce(made.enabled, getattr(torch, str(made.dtype)), made.cache_enabled, policy))

    def opened(self, region: p.Region) -> AbstractContextManager[Any]:
        return self._entered(self._made(region))

    def region(self, region: p.Region) -> None:
        made = self._made(region)
        with self._entered(made):
            self.block(region.body)
            if region.how == "recursive":
                with self._entered(made):
                    self.block(region.body)

    def generator(self, generator: p.Generator) -> None:
        made = self._made(generator.region)

        def loop() -> None:
            for step in generator.steps:
                with self._entered(made):
                    self.block(step)
                self.block(generator.between)

        self.surround(generator.around, loop)

    def thread(self, thread: p.Thread) -> None:
        with self._with(self._here if thread.bound else _InForce()):
            run_in_thread(partial(self.block, thread.body))

    def keeping(self) -> AbstractContextManager[Any]:
        return nullcontext()

    # What an op does there

    def apply(self, operation: Operation, args: Args) -> Tensor:
        if not self._here.enabled:
            return operation.call(*args)
        policy = self._policy().on("cpu")
        low = str(self._here.low).removeprefix("torch.")
        rule = CastPolicy(policy.rule_of(operation.canonical, low))
        if rule is CastPolicy.BANNED:
            raise BannedOpError(operation.canonical)
        refused = rule is CastPolicy.PROMOTE and not policy.repairs and self._refused_by_pytorch(args)
        if refused and self._real[len(self.notes) - 1].raised:
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
        under_rule = partial(self._under_rule, operation, rule, low)
        try:
            return under_rule(args)
        except (RuntimeError, TypeError) as error:
            if not policy.repairs or not _over_dtypes(error):
                raise
            fault = error
        for attempt in self._mended(operation, under_rule, args):
            try:
                return attempt()
            except (RuntimeError, TypeError) as error:
                if not _over_dtypes(error):
                    raise
        raise fault

    def _under_rule(self, operation: Operation, rule: CastPolicy, low: str, args: Args) -> Tensor:
        tensors = [arg for arg in args if arg is not None]
        if rule is CastPolicy.FP32_SET_OPT_DTYPE:
            return operation.call(*args, **({"dtype": torch.float32} if eligible(_name(tensors[0])) else {}))
        targets = iter(input_dtypes(rule, [_name(tensor) for tensor in tensors], low))
        return operation.call(*(None if arg is None else self._cast(arg, next(targets)) for arg in args))

    def _mended(self, operation: Operation, under_rule: Any, args: Args) -> Iterator[Any]:
        floating = [arg for arg in args if arg is not None and arg.is_floating_point()]
        dtypes = {tensor.dtype for tensor in floating}
        written = args[0] if operation.writes else None
        if written is not None:
            if written.is_floating_point():
                yield lambda: under_rule([written, *self._cast_floating(args[1:], written.dtype)])
        elif len(dtypes) > 1:
            yield lambda: under_rule(self._cast_floating(args, reduce(torch.promote_types, dtypes)))
        if dtypes and torch.float64 not in dtypes:
            yield lambda: self._in_float32(operation, args)

    def _in_float32(self, operation: Operation, args: Args) -> Tensor:
        wide = self._cast_floating(args, torch.float32)
        result = operation.call(*wide)
        written = args[0]
        if not operation.writes or written is None:
            return result
        return written.copy_(result)

    def _cast_floating(self, args: Args, dtype: torch.dtype) -> Args:
        return [
            self._cast(arg, _name_of(dtype)) if arg is not None and arg.is_floating_point() else arg for arg in args
        ]

    def _refused_by_pytorch(self, args: Args) -> bool:
        """Say whether PyTorch's kernel for ``promote`` raises: it wants the region's dtype or a float32 before any other."""
        current = self._here.low
        for arg in args:
            if arg is None or not eligible(_name(arg)):
                continue
            if torch.float32 in (current, arg.dtype):
                current = torch.float32
            elif not current == arg.dtype == self._here.low:
                return True
        return False

    # How far a gradient may be off

    def _cast(self, tensor: Tensor, dtype: str) -> Tensor:
        made = tensor.to(getattr(torch, dtype))
        if made is not tensor and made.requires_grad:
            for name, weight in self.weights.items():
                if weight is tensor:
                    made.register_hook(partial(self._note_gradient, name))
        return made

    def _note_gradient(self, name: str, gradient: Tensor) -> None:
        self._cast_grads.setdefault(name, []).append(gradient.detach().float().abs())

    def noted_slack(self) -> dict[str, Tensor]:
        """Give a bound on what is lost where the gradients of n uses of one cast are summed in its dtype.

        Each of the n sums rounds: by 2**-8 of the sum of the magnitudes in bfloat16, which is more than in float16, and by
        some 1e-7 where float16 has no smaller numbers.
        """
        found, self._cast_grads = self._cast_grads, {}
        return {name: len(grads) * (sum(grads) * 2**-8 + 1e-7) for name, grads in found.items()}


def _over_dtypes(error: Exception) -> bool:
    return not any(words in str(error) for words in _NOT_OVER_DTYPES)


def _name(tensor: Tensor) -> str:
    return _name_of(tensor.dtype)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
