"""Plain models that are merely replicated, and a process group: what one rank has, all heed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mezzo.errors import SkippedStepsError
from mezzo.scaling import Verdict
from mezzo.torch import GradScaler

from .processes import Ranks
from .training import (
    INF,
    NAN,
    NUMBERS,
    OVERFLOWS,
    STEPS,
    assert_near,
    assert_same,
    batch,
    build,
    expected,
    mean_square,
    spoil,
    train,
    usual,
    values,
)

pytestmark = pytest.mark.slow  # the first one waits for the processes

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "fused adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
}


def of_all(**numbers: Any) -> GradScaler:
    return GradScaler("cpu", **{**NUMBERS, **numbers}, process_group=dist.group.WORLD)


def trained(
    scaler: torch.amp.GradScaler, optimizers: Optimizers, *, spoiled: bool, clip: Any = None, unscale: bool = False
) -> dict[str, Any]:
    model = build()
    optimizer = optimizers(list(model.parameters()))

    def before_step(step: int) -> None:
        if spoiled and step in OVERFLOWS:
            spoil(model.parameters(), INF)
        if clip or (unscale and step % 2):
            scaler.unscale_(optimizer)
        if clip:
            clip(model.parameters(), 0.05)

    seen = train(scaler, optimizer, lambda step: mean_square(model, batch(step)), before_step)
    return {**seen, "parameters": values(model)}


def replicated(rank: int) -> dict[str, Any]:
    return {name: trained(of_all(), of, spoiled=rank == 1) for name, of in OPTIMIZERS.items()}


def unscaled_first(rank: int) -> dict[str, Any]:
    """Unscaled before the step in every second iteration."""
    return {name: trained(of_all(), of, spoiled=rank == 0, unscale=True) for name, of in OPTIMIZERS.items()}


def clipped_by_the_scaler(rank: int) -> dict[str, Any]:
    results = {}
    for name, of in OPTIMIZERS.items():
        scaler = of_all()
        results[name] = trained(scaler, of, spoiled=rank == 1, clip=scaler.clip_grad_norm_)
    return results


def clipped_by_torch(rank: int) -> dict[str, Any]:
    return {
        name: trained(of_all(), of, spoiled=rank == 1, clip=nn.utils.clip_grad_norm_) for name, of in OPTIMIZERS.items()
    }


def two_optimizers(rank: int) -> dict[str, Any]:
    """Of two optimizers only the one whose gradients overflow somewhere is skipped."""
    return train_two(of_all(), spoiled=rank == 1)


def train_two(scaler: torch.amp.GradScaler, *, spoiled: bool) -> dict[str, Any]:
    models = [build(), build()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    seen: dict[str, list[Any]] = {"scale": [], "tracker": []}
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(sum(mean_square(model, batch(step)) for model in models)).backward()
        if spoiled and step in OVERFLOWS:
            spoil(models[step % 2].parameters(), INF)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        seen["scale"].append(scaler.get_scale())
        seen["tracker"].append(scaler._get_growth_tracker())
    return {**seen, "parameters": [value for model in models for value in values(model)]}


NAN_STEPS = range(4, 12)


def nan_rule(rank: int) -> dict[str, Any]:
    """NaN on rank 1 only, for longer than the scale goes along."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = of_all(max_nan_backoffs=3)
    scaler.name_parameters(model)
    names: list[list[str]] = []

    def before_step(step: int) -> None:
        if step - 1 in NAN_STEPS:
            names.append([one.name for one in scaler.nonfinite(optimizer)])
        if rank == 1 and step in NAN_STEPS:
            spoil(model.parameters(), NAN)

    seen = train(scaler, optimizer, lambda step: mean_square(model, batch(step)), before_step)
    return {**seen, "parameters": values(model), "names": names}


def nan_here_inf_there(rank: int) -> dict[str, Any]:
    """NaN on one rank and Inf on the other: an overflow, so the scale keeps falling."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def before_step(step: int) -> None:
        if step in NAN_STEPS:
            spoil(model.parameters(), NAN if rank else INF)

    scaler = of_all(max_nan_backoffs=3)
    seen = train(scaler, optimizer, lambda step: mean_square(model, batch(step)), before_step)
    return {**seen, "parameters": values(model)}


def observed(rank: int) -> list[dict[str, Any]]:
    """What can be read of each step, with an ordinary optimizer and a fused one, whose verdict the host does not read."""
    return [observe(rank, of) for of in OPTIMIZERS.values()]


def observe(rank: int, of: Optimizers) -> dict[str, Any]:
    model = build()
    optimizer = of(list(model.parameters()))
    called: list[int] = []
    scaler = of_all(on_overflow=lambda overflow: called.append(overflow.skipped_in_a_row))
    seen: dict[str, Any] = {"stepped": [], "found": [], "in a row": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(mean_square(model, batch(step))).backward()
        if rank == 1 and step in OVERFLOWS:
            spoil(model.parameters(), INF)
        scaler.step(optimizer)
        scaler.update()
        seen["stepped"].append(scaler.stepped(optimizer))
        seen["found"].append(float(scaler.found_inf(optimizer)) > 0)
        seen["in a row"].append(scaler.skipped_in_a_row(optimizer))
    return {**seen, "taken": scaler.steps_taken(optimizer), "called": called}


def too_many_skips(rank: int) -> dict[str, Any]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reached: list[int] = []

    def before_step(step: int) -> None:
        reached.append(step)
        if rank == 1 and step >= 4:
            spoil(model.parameters(), INF)

    try:
        scaler = of_all(max_skipped=3)
        train(scaler, optimizer, lambda step: mean_square(model, batch(step)), before_step)
    except SkippedStepsError as error:
        return {"reached": reached, "text": str(error)}
    return {"reached": reached, "text": None}


def closures(rank: int) -> dict[str, Any]:
    """L-BFGS: a rank whose evaluation is finite stops at the same evaluation as the one whose is not."""
    return train_with_closure(of_all(), spoiled=rank == 1)


def train_with_closure(scaler: GradScaler, *, spoiled: bool) -> dict[str, Any]:
    model = build()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    seen: dict[str, list[Any]] = {"scale": [], "tracker": [], "evaluations": []}
    for step in range(STEPS):
        evaluations = 0

        def closure() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            loss = mean_square(model, batch(step))
            scaler.scale(loss).backward()
            if spoiled and step in OVERFLOWS and evaluations == 2:
                spoil(model.parameters(), INF)
            return loss

        scaler.step(optimizer, closure)
        scaler.update()
        seen["scale"].append(scaler.get_scale())
        seen["tracker"].append(scaler._get_growth_tracker())
        seen["evaluations"].append(evaluations)
    return {**seen, "parameters": values(model)}


def merged(rank: int) -> dict[str, Any]:
    """Two losses over one model, each with a scaler of its own; the second overflows on rank 1."""
    from mezzo.torch import step_merged

    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scalers = [of_all(), of_all(init_scale=2.0**3)]
    seen: dict[str, list[Any]] = {"scale": [], "tracker": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        for number, scaler in enumerate(scalers):
            factor = INF if rank == 1 and number == 1 and step in OVERFLOWS else 1.0
            with scaler.merge(optimizer):
                scaler.scale(mean_square(model, batch(step + 50 * number)) * factor).backward()
        step_merged(optimizer, scalers)
        for scaler in scalers:
            scaler.update()
        seen["scale"].append([scaler.get_scale() for scaler in scalers])
        seen["tracker"].append([scaler._get_growth_tracker() for scaler in scalers])
    return {**seen, "parameters": values(model)}


CHECKS = [
    replicated,
    unscaled_first,
    clipped_by_the_scaler,
    clipped_by_torch,
    two_optimizers,
    nan_rule,
    nan_here_inf_there,
    observed,
    too_many_skips,
    closures,
    merged,
]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("check", ["replicated", "unscaled_first"])
def test_replicas_skip_together(ranks: Ranks, check: str, name: str) -> None:
    reference = trained(
        torch.amp.GradScaler("cpu", **NUMBERS), OPTIMIZERS[name], spoiled=True, unscale=check == "unscaled_first"
    )
    assert_near(assert_same([result[name] for result in ranks[check]]), reference)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("check", ["clipped_by_the_scaler", "clipped_by_torch"])
def test_replicas_that_clip_skip_together(ranks: Ranks, check: str, name: str) -> None:
    scaler = torch.amp.GradScaler("cpu", **NUMBERS)
    reference = trained(scaler, OPTIMIZERS[name], spoiled=True, clip=nn.utils.clip_grad_norm_)
    result = assert_same([result[name] for result in ranks[check]])
    if check == "clipped_by_torch":
        assert_near(result, reference)
    else:
        # mezzo's norm may be taken of the still scaled gradients.
        assert_near(result, reference, rtol=1e-5, atol=1e-6)


def test_of_two_optimizers_only_the_one_that_overflowed_somewhere_is_skipped(ranks: Ranks) -> None:
    reference = train_two(torch.amp.GradScaler("cpu", **NUMBERS), spoiled=True)
    assert_near(assert_same(ranks["two_optimizers"]), reference)


def test_a_nan_on_one_rank_stops_the_backing_off_of_all(ranks: Ranks) -> None:
    first, second = ranks["nan_rule"]
    verdicts = [Verdict.NAN if step in NAN_STEPS else Verdict.FINITE for step in range(STEPS)]
    rule = expected(verdicts, max_nan_backoffs=3)
    assert rule["scale"][11] == rule["scale"][6], "the reference is to stop too"
    result = assert_same([first, second])
    assert (result["scale"], result["tracker"]) == (rule["scale"], rule["tracker"])
    # A rank names what is its own: the gradients of rank 0 are finite.
    assert second["names"] == [["0.weight"]] * len(NAN_STEPS)
    assert first["names"] == [[]] * len(NAN_STEPS)


def test_nan_on_one_rank_and_inf_on_the_other_is_an_overflow_for_both(ranks: Ranks) -> None:
    verdicts = [Verdict.INF if step in NAN_STEPS else Verdict.FINITE for step in range(STEPS)]
    rule = expected(verdicts, max_nan_backoffs=3)
    result = assert_same(ranks["nan_here_inf_there"])
    assert (result["scale"], result["tracker"]) == (rule["scale"], rule["tracker"])


def test_all_ranks_can_read_what_happened(ranks: Ranks) -> None:
    first, second = ranks["observed"]
    assert first == second
    for seen in first:
        assert seen["stepped"] == [step not in OVERFLOWS for step in range(STEPS)]
        assert seen["found"] == [step in OVERFLOWS for step in range(STEPS)]
        assert seen["in a row"] == [0, 0, 1, 0, 0, 1, 2, 0, 0, 0, 0, 1, 0, 0]
        assert seen["taken"] == STEPS - len(OVERFLOWS)
    # With a fused optimizer the host does not know of an overflow in `step`, so only the others call back.
    assert [seen["called"] for seen in first][:2] == [[1, 1, 2, 1]] * 2


def test_too_many_skips_are_an_error_on_all_ranks_at_the_same_step(ranks: Ranks) -> None:
    first, second = ranks["too_many_skips"]
    assert first["reached"] == second["reached"] == list(range(7))
    assert "0.weight" in second["text"] or "params" in second["text"]
    assert first["text"] is not None


def test_closures_stop_at_the_same_evaluation_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks["closures"]
    result = assert_same([first, second])
    assert first["evaluations"] == second["evaluations"]
    assert_near(result, train_with_closure(GradScaler("cpu", **NUMBERS), spoiled=True))
    rule = expected(usual())
    assert (result["scale"], result["tracker"]) == (rule["scale"], rule["tracker"])


def test_of_two_merged_losses_the_one_that_overflowed_somewhere_backs_off(ranks: Ranks) -> None:
    result = assert_same(ranks["merged"])
    finite = expected([Verdict.FINITE] * STEPS)
    overflowed = expected(usual(), init_scale=2.0**3)
    assert result["scale"] == [list(pair) for pair in zip(finite["scale"], overflowed["scale"], strict=True)]
    assert result["tracker"] == [list(pair) for pair in zip(finite["tracker"], overflowed["tracker"], strict=True)]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        (mean_square(model, batch(step)) + mean_square(model, batch(step + 50))).backward()
        if step not in OVERFLOWS:
            optimizer.step()
    assert all(math.isfinite(float(value.sum())) for value in values(model))
    torch.testing.assert_close(result["parameters"], values(model), rtol=1e-5, atol=1e-6)
