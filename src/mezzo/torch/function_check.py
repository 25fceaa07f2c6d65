"""`check_function`: does a custom `torch.autograd.Function` work in autocast regions as it is?

Nobody outside of PyTorch sees a Function being applied, so mezzo cannot mend one without patching PyTorch. The gradients'
dtypes need no mending: the autograd engine casts each to its input's. What goes wrong is inside: ``forward`` computes in one
dtype what ``backward``, which runs after the region, then meets in another; or a kernel cannot take the lower precision, or
takes it for something else. Whether it does can be tried out, and so can the cures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import Function

from mezzo.builtin import PolicyLike
from mezzo.errors import MezzoError
from mezzo.torch.autocast import autocast
from mezzo.torch.foreign import register_function
from mezzo.torch.function_trials import Check, Trial, first_line
from mezzo.torch.functions import custom_bwd, custom_fwd
from mezzo.torch.ops import check_device

__all__ = ["FunctionError", "Trial", "check_function"]


class FunctionError(MezzoError, RuntimeError):
    """A custom autograd function fails, or gives wrong numbers, in autocast regions."""


def check_function(
    function: type[Function],
    *args: Any,
    device_type: str,
    dtype: torch.dtype = torch.bfloat16,
    policy: PolicyLike | None = None,
    tolerance: float = 0.05,
) -> tuple[Trial, ...]:
    """Try a custom autograd function in autocast regions, and say how to decorate it if it goes wrong there.

    It is run with its tensors in float32 and in the lower precision, together and mixed, as the ops before it may leave
    them, and with the backward pass after the region and in it. Outputs and gradients are held against those in float32
    without autocast, from the same values. This is no `torch.autograd.gradcheck`: a ``backward`` that is wrong in float32
    too passes.

    Args:
        function: The `torch.autograd.Function` subclass.
        *args: What ``function.apply`` takes: small examples, with values like those it meets. Tensors that require gradients
            get them; if none does, all floating tensors do.
        device_type: The device type of the regions.
        dtype: Their dtype.
        policy: Their policy, as in `mezzo.torch.autocast`.
        tolerance: How far outputs and gradients may be from those without autocast, in the norm, relative to them.

    Returns:
        What was tried; all of it went well.

    Raises:
        FunctionError: Something went wrong. The message names the function, what it failed at, and the cures that were
            tried with success.
        TypeError: ``function`` is no such class.

    Random numbers are the same in every run and are put back at the end. Thread-safe as far as the function is.

    Example:
        >>> import torch
        >>> class Product(Function):
        ...     @staticmethod
        ...     def forward(ctx, a, b):
        ...         ctx.save_for_backward(a, b)
        ...         return a @ b
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         a, b = ctx.saved_tensors
        ...         return grad @ b.mT, a.mT @ grad
        >>> check_function(Product, torch.rand(3, 3), torch.rand(3, 3), device_type="cpu")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        mezzo.torch.function_check.FunctionError: Product goes wrong in autocast regions, in 3 of 8 trials:
          inputs float32, float32; backward after the region: RuntimeError: expected m1 and m2 to have the same dtype...
    """
    if not (isinstance(function, type) and issubclass(function, Function)):
        msg = f"check_function takes a torch.autograd.Function subclass, got {function!r}."
        raise TypeError(msg)
    device_type = check_device(device_type)
    check = Check(args, device_type, lambda: autocast(device_type, dtype=dtype, policy=policy), dtype, tolerance)
    try:
        check.make_references(function.apply)
    except Exception as error:
        msg = f"{function.__name__} fails with these arguments in float32 without autocast too: {first_line(error)}"
        raise FunctionError(msg) from error
    trials = check.trials(function.apply)
    if any(trial.fault for trial in trials):
        raise FunctionError(_report(function, trials, list(_cures(function, check))))
    return trials


def _cures(function: type[Function], check: Check) -> Iterator[str]:
    """Try the cures, and give the lines of those that work."""
    device = f"device_type={check.device_type!r}"
    for cast_inputs, option in ((None, ""), (torch.float32, ", cast_inputs=torch.float32")):
        decorated = _decorated(function, check.device_type, cast_inputs)
        if not any(trial.fault for trial in check.trials(decorated.apply)):
            setup = "" if function.setup_context is Function.setup_context else "; setup_context as forward"
            yield f"@custom_fwd({device}{option}) on forward, @custom_bwd({device}) on backward{setup}"
            break
    in_fp32 = register_function(cast_policy="fp32")(function.apply)
    if not any(trial.fault for trial in check.trials(in_fp32)):
        yield f'if it is not yours: mezzo.torch.register_function({function.__name__}, "apply", "fp32")'


def _decorated(function: type[Function], device_type: str, cast_inputs: torch.dtype | None) -> type[Function]:
    """Make a subclass with mezzo's decorators."""
    decorate = custom_fwd(device_type=device_type, cast_inputs=cast_inputs)
    methods: dict[str, Any] = {"forward": staticmethod(decorate(function.forward))}
    if function.setup_context is not Function.setup_context:
        methods["setup_context"] = staticmethod(decorate(function.setup_context))
    backward = "backward" if function.vjp is Function.vjp else "vjp"
    methods[backward] = staticmethod(custom_bwd(getattr(function, backward), device_type=device_type))
    return type(function.__name__, (function,), methods)


def _report(function: type[Function], trials: tuple[Trial, ...], cures: list[str]) -> str:
    faulty = [trial for trial in trials if trial.fault]
    shown = "".join(f"\n  {trial}" for trial in faulty[:4])
    more = f"\n  and {len(faulty) - 4} more" if len(faulty) > 4 else ""
    title = (
        f"{function.__name__} goes wrong in autocast regions, in {len(faulty)} of {len(trials)} trials:{shown}{more}"
    )
    if not cures:
        return f"{title}\nNeither custom_fwd nor running it in float32 helps; call it in a region with enabled=False."
    return "\n".join(
        [title, "Tried, and all right (custom_fwd and custom_bwd of mezzo.torch):", *(f"  {c}" for c in cures)]
    )
