"""Watching changes no value, dtype, gradient, random number or error, nor how long a tensor lives."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.torch import GradScaler, autocast, explain, find_nonfinite, prepare
from mezzo.torch.kernels import installed_kernels

from .nets import batch, net


class Nothing(TorchDispatchMode):
    """A mode of PyTorch's that does nothing: under any mode a few ops of linalg take another way through PyTorch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def watching() -> AbstractContextManager[object]:
    stack = ExitStack()
    stack.enter_context(explain(numerics=True))
    stack.enter_context(find_nonfinite())
    return stack


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)


def same(one: Tensor, two: Tensor) -> bool:
    if one.dtype != two.dtype or one.layout is not two.layout or one.shape != two.shape:
        return False
    if one.layout is not torch.strided or one.is_nested:
        return True
    if one.stride() != two.stride():
        return False
    pair = (torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in (one, two))
    return torch.equal(*(torch.nan_to_num(each.double()) for each in pair))


OPS = [op for op in op_db if torch.float32 in op.dtypes and "empty" not in op.name]


def outcome(call: Callable[[], Any]) -> tuple[list[Tensor], type | None, Tensor]:
    torch.manual_seed(0)
    try:
        found = list(tensors(call()))
    except Exception as error:
        return [], type(error), torch.get_rng_state()
    return found, None, torch.get_rng_state()


@pytest.mark.filterwarnings("ignore")  # of many ops PyTorch gives notice, and only once in a process
@pytest.mark.parametrize("part", range(4))
def test_every_op_gives_what_it_gives(part: int) -> None:
    """The first sample of each op of PyTorch's own database, in a region."""
    differing = []
    for op in OPS[part::4]:
        # Not `op.sample_inputs`: that one walks the call stack for a unittest at every op, which takes longer than all else.
        sample = next(iter(op.sample_inputs_func(op, "cpu", torch.float32, requires_grad=False)), None)
        if sample is None:
            continue

        def call(op: Any = op, sample: Any = sample) -> Any:
            with autocast("cpu", dtype=torch.bfloat16):
                return op.op(sample.input, *sample.args, **sample.kwargs)

        with Nothing():
            plain, error, state = outcome(call)
        with watching():
            seen, seen_error, seen_state = outcome(call)
        is_same = error is seen_error and torch.equal(state, seen_state)
        if not is_same or not all(itertools.starmap(same, zip(plain, seen, strict=True))):
            differing.append(op.name)
    assert differing == []


def train(
    low: torch.dtype, around: Callable[[], AbstractContextManager[object]], make: Callable[[nn.Module], Any]
) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(net(), nn.Dropout(0.2))
    optimizer = make(model)
    scaler = GradScaler("cpu", init_scale=64.0)
    for _ in range(3):
        with around():
            optimizer.zero_grad()
            with autocast("cpu", dtype=low):
                loss = model(batch()).float().square().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return [parameter.detach().clone() for parameter in model.parameters()], torch.get_rng_state()


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), 0.01),
    "fused adamw": lambda model: torch.optim.AdamW(model.parameters(), 0.01, fused=True),
    "prepared": lambda model: prepare(model, torch.optim.AdamW(model.parameters(), 0.01), dtype=torch.bfloat16)[1],
}


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_training_gives_the_same_weights_to_the_bit(low: torch.dtype, make: Callable[[nn.Module], Any]) -> None:
    plain, state = train(low, nullcontext, make)
    seen, seen_state = train(low, watching, make)
    assert all(map(torch.equal, plain, seen))
    assert torch.equal(state, seen_state)


def test_a_stale_cast_of_pytorchs_own_stays_one() -> None:
    """In a plain region the program computes with what PyTorch kept, and a look at it must not mend that."""

    def run() -> Tensor:
        linear = nn.Linear(2, 2, bias=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            linear(torch.ones(1, 2))
            with torch.no_grad():
                linear.weight.zero_()
            return linear(torch.ones(1, 2)).detach()

    torch.manual_seed(0)
    plain = run()
    torch.manual_seed(0)
    with watching():
        seen = run()
    assert torch.equal(plain, seen)
    # Once a policy in this process has had mezzo serve `linear`, mezzo's cast is kept there, and that is never stale.
    assert bool(plain.abs().sum() > 0) is not ("aten::linear" in installed_kernels("cpu"))


def test_tensors_die_when_they_would() -> None:
    deaths: list[str] = []

    def run() -> None:
        x = torch.randn(4, 4, requires_grad=True)
        hidden = (x @ x).relu()
        weakref.finalize(hidden, deaths.append, "hidden")
        loss = hidden.sum()
        del hidden
        deaths.append("before backward")
        loss.backward()
        deaths.append("after backward")

    run()
    plain, deaths[:] = list(deaths), []
    with watching():
        run()
    assert deaths == plain
