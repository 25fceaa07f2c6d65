"""An optimizer step over low-precision parameters as one function that PyTorch compiles.

The formulas are those of `torch.optim.Adam`, `AdamW` and `SGD`. What changes from step to step are tensors, so that a
schedule compiles nothing again: there is one function per formula, pair of dtypes and number of threads.
"""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mezzo.errors import PreparationError

from .blocked_pass import number

if TYPE_CHECKING:
    from .single_pass import Flat

__all__ = ["Kind", "kernel", "update_"]

_EXAMPLE = 2**20
"""The size for which a function is compiled first: for small ones the compiler would not use threads."""
_NUMBERS = 8
"""How many numbers a formula gets at most; a multiple of 4, so that each parameter's begin where a GPU can load them."""

Formula = Callable[[Tensor, Tensor, Sequence[Tensor], Tensor], tuple[Tensor, ...]]
"""From float32 gradient, parameter, state and numbers to parameter and state after the step."""
Kernel = Callable[..., None]


class Kind(NamedTuple):
    """What a compiled function is for.

    Attributes:
        adam: Whether the formula is Adam's, else SGD's.
        decay: ``"decoupled"``, ``"added"`` to the gradient, or None without weight decay.
        maximize: As the optimizer's.
        keeps: How many tensors the optimizer keeps for a parameter.
        nesterov: As SGD's.
        swift: Whether Adam's mean is nearer to the new gradient than to the mean before: beta1 is at most 0.5.
        scaled: Whether gradients are divided by a scale.
        guarded: Whether a flag on the device can make the step change nothing.
        gradient: The dtype of the gradient.
        low: The dtype of the model's parameter.
        device: The type of the device.
        threads: How many threads there are, which is compiled in.
    """

    adam: bool
    decay: str | None
    maximize: bool
    keeps: int
    nesterov: bool
    swift: bool
    scaled: bool
    guarded: bool
    gradient: torch.dtype
    low: torch.dtype
    device: str
    threads: int


_lock = threading.Lock()
_kernels: dict[Kind, Kernel] = {}


def kernel(optimizer: torch.optim.Optimizer, group: dict[str, Any], flat: Flat, scaled: bool, guarded: bool) -> Kernel:
    """Give the compiled function for a parameter; it is compiled once per process.

    Args:
        optimizer: An Adam, AdamW or SGD.
        group: The group.
        flat: The parameter.
        scaled: Whether gradients are divided by a scale.
        guarded: Whether a flag on the device can make the step change nothing.

    Returns:
        A function of gradient, master, parameter, numbers, scale, flag and state, which writes to all but the gradient.

    Raises:
        PreparationError: It cannot be compiled.

    May be called from several threads.
    """
    adam = type(optimizer) is not torch.optim.SGD
    decay = "decoupled" if adam and group["decoupled_weight_decay"] else "added"
    kind = Kind(
        adam=adam,
        decay=decay if group["weight_decay"] else None,
        maximize=bool(group["maximize"]),
        keeps=2 + bool(group["amsgrad"]) if adam else int(bool(group["momentum"])),
        nesterov=not adam and bool(group["nesterov"]),
        swift=adam and number(group["betas"][0]) <= 0.5,
        scaled=scaled,
        guarded=guarded,
        gradient=flat.gradient.dtype,
        low=flat.low.dtype,
        device=flat.wide.device.type,
        threads=torch.get_num_threads(),
    )
    found = _kernels.get(kind)
    return _compile(kind) if found is None else found


def _compile(kind: Kind) -> Kernel:
    with _lock:
        if kind in _kernels:
            return _kernels[kind]
        options: dict[str, Any] = {
            # Nothing is left to guard: the kind has all that a function depends on.
            "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
            "cpp.threads": kind.threads,
        }
        made: Kernel = torch.compile(_step_of(kind), fullgraph=True, dynamic=True, options=options)
        try:
            with warnings.catch_warnings():
                # Inductor's own imports warn of what PyTorch deprecates; as errors they would look like a missing compiler.
                warnings.simplefilter("ignore")
                # On tensors that nobody needs, and under the lock: a failure changes nothing.
                made(*_example(kind))
        except (RuntimeError, ImportError, OSError) as error:
            msg = (
                "compiled=True needs a compiler that torch.compile can use (on a CPU a C++ compiler, on CUDA Triton), and "
                f"here it failed: {_summary(error)} Install one, or call prepare with compiled=False."
            )
            raise PreparationError(msg) from error
        _kernels[kind] = made
        return made


def _summary(error: BaseException) -> str:
    """Give the first two lines: with Dynamo's errors the second one has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()][:2]
    return f"{type(error).__name__}: {' '.join(lines)}".rstrip(".") + "."


def _example(kind: Kind) -> list[Tensor | None]:
    def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=kind.device)

    return [
        zeros(kind.gradient, _EXAMPLE),
        zeros(torch.float32, _EXAMPLE),
        zeros(kind.low, _EXAMPLE),
        zeros(torch.float32, _NUMBERS),
        zeros(torch.float32) if kind.scaled else None,
        zeros(torch.bool) if kind.guarded else None,
        *(zeros(torch.float32, _EXAMPLE) for _ in range(kind.keeps)),
    ]


def _step_of(kind: Kind) -> Kernel:
    formula = _adam(kind) if kind.adam else _sgd(kind)

    def step(
        gradient: Tensor,
        wide: Tensor,
        low: Tensor,
        numbers: Tensor,
        scale: Tensor | None,
        skip: Tensor | None,
        *kept: Tensor,
    ) -> None:
        lifted = gradient.to(torch.float32)
        if scale is not None:
            lifted = lifted / scale
        if kind.maximize:
            lifted = -lifted
        after = formula(lifted, wide, kept, numbers)
        rounded = after[0].to(low.dtype)
        for old, new in zip((wide, *kept, low), (*after, rounded), strict=True):
            old.copy_(new if skip is None else torch.where(skip, old, new))

    # What is compiled is kept with the code, and without guards the first would be taken for all.
    return types.FunctionType(step.__code__.replace(), step.__globals__, None, None, step.__closure__)


def _adam(kind: Kind) -> Formula:
    def formula(gradient: Tensor, wide: Tensor, kept: Sequence[Tensor], numbers: Tensor) -> tuple[Tensor, ...]:
        decay, weight, beta2, rest2, root, eps, size = (numbers[place] for place in range(7))
        mean, square = kept[:2]
        if kind.decay == "decoupled":
            wide = wide * decay
        elif kind.decay == "added":
            gradient = gradient + wide * decay
        mean = (gradient if kind.swift else mean) + weight * (gradient - mean)
        square = square * beta2 + rest2 * gradient * gradient
        state: tuple[Tensor, ...] = (mean, square)
        if kind.keeps == 3:
            state = (mean, square, torch.maximum(kept[2], square))
        return wide + size * mean / (state[-1].sqrt() * root + eps), *state

    return formula


def _sgd(kind: Kind) -> Formula:
    def formula(gradient: Tensor, wide: Tensor, kept: Sequence[Tensor], numbers: Tensor) -> tuple[Tensor, ...]:
        decay, momentum, share, size = (numbers[place] for place in range(4))
        if kind.decay is not None:
            gradient = gradient + wide * decay
        if not kept:
            return (wide + gradient * size,)
        buffer = kept[0] * momentum + gradient * share
        gradient = gradient + buffer * momentum if kind.nesterov else buffer
        return wide + gradient * size, buffer

    return formula


def update_(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    flat: list[Flat],
    kernels: Sequence[Kernel],
    scale: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Step masters and round them to the model; see `mezzo.torch.masters.single_pass.update_`.

    Args:
        optimizer: An Adam, AdamW or SGD.
        group: Its group.
        flat: Masters of the group, on one device; Adam's have their state.
        kernels: The function of each.
        scale: What to divide gradients by; float32, of one element, on their device.
        skip: Where True, nothing changes; bool, of one element, on their device.
    """
    make = _sgd_numbers if type(optimizer) is torch.optim.SGD else _adam_numbers
    numbers, names = make(optimizer, group, flat, skip)
    for each, run, of_it in zip(flat, kernels, numbers, strict=True):
        state = optimizer.state[each.master] if names else {}  # type: ignore[index]
        kept = [state[name].as_strided((each.wide.numel(),), (1,)) for name in names]
        if each.wide.numel():
            run(each.gradient, each.wide, each.low, of_it, scale, skip, *kept)


Numbers = tuple[Sequence[Tensor], tuple[str, ...]]
"""For each parameter its numbers, float32 of shape (8,); and the names of what the optimizer keeps for it."""


def _adam_numbers(optimizer: Any, group: dict[str, Any], flat: list[Flat], skip: Tensor | None) -> Numbers:
    steps = [optimizer.state[each.master]["step"] for each in flat]
    torch._foreach_add_(steps, 1 if skip is None else (~skip).to(steps[0].device, torch.float32))
    lr, decay, (beta1, beta2) = number(group["lr"]), number(group["weight_decay"]), map(number, group["betas"])
    # In float64, as PyTorch computes them: 1 - 0.999 in float32 is good for four digits.
    count = torch.stack(steps).to(torch.float64)
    rows = count.new_empty(len(steps), _NUMBERS)
    weight = -beta1 if beta1 <= 0.5 else 1 - beta1
    same = (
        1 - lr * decay if group["decoupled_weight_decay"] else decay,
        weight,
        beta2,
        1 - beta2,
        0,
        group["eps"],
        0,
        0,
    )
    rows.copy_(torch.tensor(same, dtype=torch.float64, device="cpu"))
    rows[:, 4] = (1 - beta2**count).rsqrt()
    rows[:, 6] = -lr / (1 - beta1**count)
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 2 + bool(group["amsgrad"])]
    return rows.to(flat[0].wide.device, torch.float32, non_blocking=True).unbind(), names


def _sgd_numbers(optimizer: Any, group: dict[str, Any], flat: list[Flat], _skip: Tensor | None) -> Numbers:
    momentum, share = group["momentum"], 1 - group["dampening"]
    numbers = (number(group["weight_decay"]), momentum, share, -number(group["lr"]), 0, 0, 0, 0)
    # Dampening begins with the second step.
    both = torch.tensor([numbers, (*numbers[:2], 1.0, *numbers[3:])], dtype=torch.float32, device="cpu")
    later, first = both.to(flat[0].wide.device, non_blocking=True)
    if not momentum:
        return [later] * len(flat), ()
    rows = []
    for each in flat:
        state = optimizer.state[each.master]
        rows.append(later if state.get("momentum_buffer") is not None else first)
        if rows[-1] is first:
            state["momentum_buffer"] = torch.zeros_like(each.master.values())
    return rows, ("momentum_buffer",)
