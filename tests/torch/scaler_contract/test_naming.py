"""Which parameters overflowed: by name, NaN and Inf apart, and still known when the gradients are gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mezzo.errors import ScalerProtocolError, SkippedStepsError
from mezzo.torch import GradScaler, NonFinite

from .optimizers import Momentum
from .overflowing import INF, NAN, backward, iterate, net

Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "unmodified": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
    "custom": lambda parameters: Momentum(parameters, scaled=True),
}
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
explicit_or_not = pytest.mark.parametrize("explicit", [False, True], ids=["implicit", "unscale_"])

BAD = {"0.weight": [NAN, INF, 1.0, -INF], "2.bias": [NAN]}
FOUND = (NonFinite("0.weight", 1, 2, 6, "float32"), NonFinite("2.bias", 1, 0, 1, "float32"))


@explicit_or_not
@optimizers
def test_nan_and_inf_are_counted_apart(make: Make, explicit: bool) -> None:
    model, scaler = net(), GradScaler("cpu")
    optimizer = make(model.named_parameters())
    backward(scaler, model, BAD)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert scaler.nonfinite(optimizer) == FOUND
    scaler.update()
    assert scaler.nonfinite(optimizer) == FOUND


def test_a_finding_reads_as_a_line() -> None:
    assert str(NonFinite("layer.0.weight", 3, 1, 64, "float32")) == "layer.0.weight: 3 NaN, 1 Inf of 64 (float32)"


@optimizers
def test_there_are_none_after_a_step_that_was_made(make: Make) -> None:
    model, scaler = net(), GradScaler("cpu")
    optimizer = make(model.named_parameters())
    for bad in (None, BAD, None):
        iterate(scaler, model, optimizer, bad)
        assert scaler.nonfinite(optimizer) == (() if bad is None else FOUND)


@optimizers
def test_asked_before_any_step_it_says_so(make: Make) -> None:
    optimizer, scaler = make([nn.Parameter(torch.ones(2))]), GradScaler("cpu")
    for ask in (scaler.nonfinite, scaler.stepped, scaler.found_inf):
        with pytest.raises(ScalerProtocolError, match=rf"^{ask.__name__}\(\) was asked about an optimizer of type"):
            ask(optimizer)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("updated", [True, False])
def test_names_survive_zero_grad(updated: bool, set_to_none: bool) -> None:
    model, scaler = net(), GradScaler("cpu")
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    backward(scaler, model, BAD)
    scaler.step(optimizer)
    if updated:
        scaler.update()
    optimizer.zero_grad(set_to_none=set_to_none)
    assert scaler.nonfinite(optimizer) == FOUND


def test_names_survive_gradients_that_are_overwritten() -> None:
    model, scaler = net(), GradScaler("cpu")
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    backward(scaler, model, BAD)
    scaler.step(optimizer)
    for parameter in model.parameters():
        parameter.grad.fill_(NAN)
    assert scaler.nonfinite(optimizer) == FOUND


@optimizers
def test_what_was_asked_once_is_known_until_the_next_step(make: Make) -> None:
    """A step that the device decided on is looked at when somebody asks; not again when the gradients are gone."""
    model, scaler = net(), GradScaler("cpu")
    optimizer = make(model.named_parameters())
    iterate(scaler, model, optimizer, BAD)
    assert scaler.nonfinite(optimizer) == FOUND
    optimizer.zero_grad()
    backward(scaler, model, {"2.weight": [INF]})
    assert scaler.nonfinite(optimizer) == FOUND
    scaler.step(optimizer)
    assert [found.name for found in scaler.nonfinite(optimizer)] == ["2.weight"]


@pytest.mark.parametrize("bad", [[NAN, 1.0], [INF, 1.0], [NAN, INF]], ids=["NaN", "Inf", "both"])
@explicit_or_not
@optimizers
def test_names_survive_clipping_with_the_scaler(make: Make, explicit: bool, bad: list[float]) -> None:
    model, scaler = net(), GradScaler("cpu")
    optimizer = make(model.named_parameters())
    backward(scaler, model, {"2.weight": bad})
    if explicit:
        scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    found = NonFinite("2.weight", bad.count(NAN), bad.count(INF), 3, "float32")
    assert scaler.nonfinite(optimizer) == (found,)


@pytest.mark.parametrize(
    ("bad", "found"), [(INF, [NonFinite("2.weight", 1, 0, 3, "float32")]), (NAN, [])], ids=["Inf", "NaN"]
)
@optimizers
def test_after_clipping_with_pytorchs_function_what_can_still_be_seen_is_told(
    make: Make, bad: float, found: list[NonFinite]
) -> None:
    """Divided by an infinite norm, an Inf is NaN and all else is 0. Divided by NaN, everything is NaN."""
    model, scaler = net(), GradScaler("cpu")
    optimizer = make(model.named_parameters())
    backward(scaler, model, {"2.weight": [bad]})
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert list(scaler.nonfinite(optimizer)) == found
    assert not scaler.stepped(optimizer)


# Where names come from


def named(optimizer: torch.optim.Optimizer, scaler: GradScaler, weight: torch.Tensor) -> list[str]:
    """The names that an Inf in ``weight``'s gradient is reported under."""
    scaler.scale(torch.ones(()))
    weight.grad = torch.full_like(weight, INF)
    scaler.step(optimizer)
    scaler.update()
    return [found.name for found in scaler.nonfinite(optimizer)]


@optimizers
def test_an_optimizer_made_of_named_parameters_names_them(make: Make) -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = make([("first", weights[0]), ("second", weights[1])])
    assert named(optimizer, GradScaler("cpu"), weights[1]) == ["second"]


def test_a_model_that_lives_names_its_parameters() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert named(optimizer, GradScaler("cpu"), model[2].weight) == ["2.weight"]


def test_the_outermost_module_gives_the_name() -> None:
    outer = nn.Module()
    outer.body = net()
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
    assert named(optimizer, GradScaler("cpu"), outer.body[0].bias) == ["body.0.bias"]


def test_parameters_of_no_module_are_named_by_their_place() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    gc.collect()
    optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.2}], lr=0.1)
    assert named(optimizer, GradScaler("cpu"), weights[3]) == ["param_groups[1]['params'][2]"]


@pytest.mark.parametrize("how", ["module", "pairs", "iterator"])
def test_names_that_were_given_come_first(how: str) -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2)})
    inner: Any = model["encoder"]
    optimizer = torch.optim.SGD([("old", inner.weight), ("older", inner.bias)], lr=0.1)
    scaler = GradScaler("cpu")
    pairs = [("mine", inner.weight)]
    scaler.name_parameters({"module": model, "pairs": pairs, "iterator": iter(pairs)}[how])
    assert named(optimizer, scaler, inner.weight) == ["encoder.weight" if how == "module" else "mine"]


def test_parameters_without_a_given_name_keep_the_next_best() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    scaler.name_parameters([("mine", model[0].weight)])
    backward(scaler, model, {"0.weight": [INF], "2.bias": [INF]})
    scaler.step(optimizer)
    assert [found.name for found in scaler.nonfinite(optimizer)] == ["mine", "2.bias"]


def test_naming_keeps_no_model_alive() -> None:
    model, scaler = net(), GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.name_parameters(model)
    iterate(scaler, model, optimizer, BAD)
    assert len(scaler.nonfinite(optimizer)) == 2
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_dtype_is_the_gradients(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(5, dtype=dtype))
    optimizer, scaler = torch.optim.SGD([("w", weight)], lr=0.1), GradScaler("cpu")
    scaler.scale(torch.ones(()))
    weight.grad = torch.tensor([1.0, NAN, INF, -INF, 0.0], dtype=dtype)
    scaler.step(optimizer)
    assert scaler.nonfinite(optimizer) == (NonFinite("w", 1, 2, 5, str(dtype).removeprefix("torch.")),)


def test_complex_and_sparse_gradients_are_named() -> None:
    complex_weight, rows = nn.Parameter(torch.ones(2, dtype=torch.complex64)), nn.Parameter(torch.ones(4, 2))
    optimizer, scaler = torch.optim.SGD([("c", complex_weight), ("rows", rows)], lr=0.1), GradScaler("cpu")
    scaler.scale(torch.ones(()))
    complex_weight.grad = torch.tensor([complex(1.0, INF), 1.0])
    rows.grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 3]]), torch.tensor([[NAN, 1.0], [1.0, 1.0]]), (4, 2), check_invariants=True
    )
    scaler.step(optimizer)
    found = {one.name: (one.nan, one.inf) for one in scaler.nonfinite(optimizer)}
    assert found == {"c": (0, 1), "rows": (1, 0)}


def test_two_optimizers_have_findings_of_their_own() -> None:
    models, scaler = [net(), net()], GradScaler("cpu")
    first, second = (torch.optim.SGD(model.named_parameters(), lr=0.1) for model in models)
    backward(scaler, models[0], BAD)
    backward(scaler, models[1])
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert scaler.nonfinite(first) == FOUND
    assert scaler.nonfinite(second) == ()


@pytest.mark.parametrize("bad", [{"2.weight": [INF]}, {"2.weight": [NAN]}], ids=["Inf", "NaN"])
def test_too_many_skips_are_an_error_that_names_the_parameters(bad: dict[str, list[float]]) -> None:
    model = net()
    optimizer, scaler = torch.optim.SGD(model.named_parameters(), lr=0.1), GradScaler("cpu", max_skipped=3)
    for _ in range(2):
        iterate(scaler, model, optimizer, bad)
    with pytest.raises(SkippedStepsError, match=r"(?s)\b3\b.*2\.weight"):
        iterate(scaler, model, optimizer, bad)
