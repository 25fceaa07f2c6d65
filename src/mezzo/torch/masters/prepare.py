"""Low-precision parameters with float32 masters: `prepare` and its undoing.

A parameter that only ops in lower precision read is cast in every forward pass. Stored in the lower precision it is not; a
float32 master in the optimizer then takes the updates, of which most would be lost to rounding in a low weight
(Micikevicius et al., "Mixed Precision Training", 2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from .copies import attach
from .gradients import replace_values, set_gradient
from .low_parameters import Choice, Selector, choose, choose_buffers
from .params import master_of
from .places import cast_state, give_places
from .preparation import Preparation, mark, preparation_of, watch_forward
from .prepare_checks import (
    check_arithmetic,
    check_model,
    check_optimizers,
    check_settings,
    checked,
)
from .settings import Owner, Settings

if TYPE_CHECKING:
    from mezzo.builtin import PolicyLike

__all__ = ["prepare"]

Optimizer = torch.optim.Optimizer
Selectors = Selector | Sequence[Selector]
M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)  # noqa: E741 - the pair of M


class Options(TypedDict, total=False):
    """The options of `prepare`, for type checkers."""

    dtype: torch.dtype
    policy: PolicyLike | None
    low: Selectors
    keep: Selectors
    buffers: bool
    masters: Literal[True, False, "kahan"]
    rounding: Literal["nearest", "stochastic"]
    seed: int
    grad_dtype: torch.dtype | None
    compiled: bool


@overload
def prepare(model: M, optimizer: None = None, **options: Unpack[Options]) -> M: ...
@overload
def prepare(model: M, optimizer: O, **options: Unpack[Options]) -> tuple[M, O]: ...
@overload
def prepare(model: M, optimizer: list[O], **options: Unpack[Options]) -> tuple[M, list[O]]: ...
def prepare(
    model: nn.Module,
    optimizer: Optimizer | list[Any] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    policy: PolicyLike | None = None,
    low: Selectors = (),
    keep: Selectors = (),
    buffers: bool = False,
    masters: Literal[True, False, "kahan"] = True,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    seed: int = 0,
    grad_dtype: torch.dtype | None = None,
    compiled: bool = False,
) -> Any:
    """Store a model's parameters in a lower precision, and give its optimizer float32 masters.

    In place: the parameters stay the same objects, those that only lower-precision ops read (of linear and convolution
    layers, attention projections) with values in ``dtype``. Norms, running statistics, embeddings and what else is not known
    to be safe stay as they are. The optimizer's ``param_groups`` hold a master for each low parameter; its state goes along.
    After each step the model is refreshed from the masters. Run the model in an autocast region of the same dtype, as
    before; the numbers are those of autocast, without its casts. docs/masters.md says when to use which option.

    Args:
        model: Not wrapped in DDP or alike: wrap it afterwards. Its parameters are float32.
        optimizer: Any ``torch.optim.Optimizer`` over the model's parameters, or a list of several. None prepares for
            inference.
        dtype: ``torch.bfloat16`` or ``torch.float16``. The latter needs a gradient scaler, as under autocast.
        policy: Says which ops are in lower precision, as `mezzo.torch.autocast` takes it. None: the default policy.
        low: What to store low besides: a glob over names of modules or parameters (``"decoder.**"``), a module class, a
            predicate ``f(name, module, parameter) -> bool``, or a sequence of these.
        keep: What to keep as it is, in the same words. It wins over ``low``.
        buffers: Store the floating-point buffers low that ``low`` names and ``keep`` does not.
        masters: Whether the optimizer holds float32 masters. ``"kahan"``: between steps a compensation in ``dtype`` stands
            for them, which takes half their memory. False: nothing does; see ``rounding``.
        rounding: To nearest, or ``"stochastic"``: up or down, so that the expected value is exact. Without masters,
            ``"nearest"`` leaves the arithmetic to the optimizer, on the low parameters themselves; ``"stochastic"``
            computes each step in float32.
        seed: Of stochastic rounding, which does not touch PyTorch's generators.
        grad_dtype: Of the gradients. None: one that is added to another, of a later backward pass or of another rank, is
            float32, one alone has the dtype it was computed in; with float16 all are float32. ``torch.float32`` or
            ``dtype``: all are.
        compiled: Step in one compiled pass over gradient, master, moments and weight, for Adam, AdamW and SGD. The first
            step compiles.

    Returns:
        The model; with an optimizer, the model and the optimizer (or the list).

    Raises:
        PreparationError: A wrapped model, one that is in low precision or prepared already; an optimizer whose parameters
            are not the model's, or that is prepared already; a selector that matches nothing; options that do not go
            together. Nothing is changed then.
        TypeError: ``model`` is no module.

    Not to be called while another thread uses the model or the optimizer.

    Example:
        >>> import mezzo.torch
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model, optimizer = mezzo.torch.prepare(model, optimizer, dtype=torch.bfloat16)
        >>> model[0].weight.dtype, model[1].weight.dtype
        (torch.bfloat16, torch.float32)
        >>> with mezzo.torch.autocast("cpu", dtype=torch.bfloat16):
        ...     loss = model(torch.ones(4, 8)).square().mean()
        >>> loss.backward()
        >>> optimizer.step()
    """
    settings = check_settings(Settings(dtype, masters, rounding, seed, grad_dtype, compiled))
    inner, optimizers = checked(model, optimizer, "prepare")
    check_model(inner, optimizers, settings, chosen=bool(low or keep or policy is not None or buffers))
    check_optimizers(inner, optimizers)
    record = preparation_of(inner)
    if record is None:
        choices = choose(inner, dtype, policy, low, keep)
        places = choose_buffers(inner, low, keep) if buffers else []
        check_arithmetic([one.parameter for one in choices if one.low], optimizers, settings)
        # Tensors made in inference mode cannot be trained.
        with torch.inference_mode(False):
            _store(inner, choices, places, optimizers, settings)
    else:
        stored = [one for name, one in inner.named_parameters() if name in record.stored]
        check_arithmetic(stored, optimizers, settings)
        record.settings, record.with_optimizer = settings, True
        with torch.inference_mode(False):
            _give_masters(inner, {id(one): (one, None) for one in stored}, optimizers, settings)
    return model if optimizer is None else (model, optimizer)


def _store(
    model: nn.Module,
    choices: list[Choice],
    places: list[tuple[nn.Module, str, str]],
    optimizers: list[Optimizer],
    settings: Settings,
) -> None:
    chosen = [one for one in choices if one.low]
    # Whatever may fail for want of memory comes before the first change.
    values = {id(one.parameter): one.parameter.detach() for one in chosen}
    narrow = {id(one.parameter): one.parameter.detach().to(settings.dtype) for one in chosen}
    held = {id(each): each for module, name, _ in places if (each := module._buffers[name]) is not None}
    narrow_buffers = {key: each.to(settings.dtype) for key, each in held.items()}
    gone = {
        name: one.parameter.dtype for one in chosen for name in one.names if one.parameter.dtype is not torch.float32
    }
    gone.update({full: dtype for m, name, full in places if (dtype := getattr(m, name).dtype) is not torch.float32})
    record = Preparation(
        settings,
        {
            **{name: one.reason for one in chosen for name in one.names},
            **{full: "buffer selected" for _, _, full in places},
        },
        {name: one.reason for one in choices if not one.low for name in one.names},
        gone,
        tuple(full for _, _, full in places),
        bool(optimizers),
    )
    for one in chosen:
        replace_values(one.parameter, narrow[id(one.parameter)])
    for module, name, _ in places:
        module._buffers[name] = narrow_buffers[id(module._buffers[name])]
    ids = set(values)
    modules = [each for each in model.modules() if any(id(one) in ids for one in each._parameters.values())]
    mark(model, record, modules)
    stored: dict[int, tuple[nn.Parameter, Tensor | None]] = {}
    stored.update({id(one.parameter): (one.parameter, values[id(one.parameter)]) for one in chosen})
    _give_masters(model, stored, optimizers, settings)


def _give_masters(
    model: nn.Module,
    stored: dict[int, tuple[nn.Parameter, Tensor | None]],
    optimizers: list[Optimizer],
    settings: Settings,
) -> None:
    if not settings.steps_in_float32:
        for optimizer in optimizers:
            for key, state in optimizer.state.items():
                if id(key) in stored:
                    optimizer.state[key] = cast_state(state, torch.float32, settings.dtype)
        for parameter, _ in stored.values():
            if parameter.grad is not None:
                set_gradient(parameter, parameter.grad.to(settings.dtype))
        return
    owner = Owner(settings)
    if optimizers:
        watch_forward(model)
    for optimizer in optimizers:
        give_places(optimizer, owner, stored)
        attach(optimizer, owner)
    record = preparation_of(model)
    if record is not None:
        record.mastered = tuple(name for name, one in model.named_parameters() if master_of(one) is not None)
