"""What happens to parameters beside the steps: freezing, ties, new groups, schedules, parametrizations, writes by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from mezzo.errors import PreparationError
from mezzo.torch import prepare

from .nets import BF16, ByHand, assert_rounded, batches, held, loss_of, mlp, prepared, train


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_a_parameter_frozen_when_preparing_may_be_unfrozen_and_another_frozen() -> None:
    def net() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    model, optimizer = prepared(sgd, net)
    reference = ByHand(net, model, sgd)
    data = batches(12)
    assert not model[0].weight.requires_grad
    for frozen, unfrozen, some in ((None, None, data[:3]), (3, 0, data[3:6]), (0, 3, data[6:9])):
        for each in (model, reference.model):
            if frozen is not None and unfrozen is not None:
                each[frozen].requires_grad_(False)
                each[unfrozen].requires_grad_(True)
        start = model[0].weight.detach().clone()
        assert train(model, optimizer, some) == [reference.step(batch) for batch in some]
        reference.assert_like(model, optimizer)
        assert torch.equal(start, model[0].weight) == (unfrozen != 0)
    model[0].requires_grad_(True)
    optimizer.zero_grad()
    for batch in data[:2]:
        loss_of(model, batch).backward()
    assert {one.grad.dtype for one in model.parameters()} == {torch.float32}


def test_tied_weights_have_one_master() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.out = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
            self.out.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.out(self.embedding((x[:, 0] * 10).long().abs() % 12))
            return result

    model, optimizer = prepared(sgd, Tied)
    assert model.out.weight is model.embedding.weight
    assert model.out.weight.dtype is torch.float32  # an embedding reads it
    model, optimizer = prepared(sgd, Tied, low="**")
    assert model.out.weight is model.embedding.weight
    assert model.out.weight.dtype is BF16
    reference = ByHand(Tied, model, sgd)
    data = batches(5)
    assert train(model, optimizer, data) == [reference.step(batch) for batch in data]
    reference.assert_like(model, optimizer)
    assert len(held(optimizer)) == 1


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [0.2, 0.1], total_steps=12, cycle_momentum=True),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    ],
    ids=["StepLR", "OneCycleLR", "ReduceLROnPlateau"],
)
def test_groups_and_schedules_are_those_of_any_optimizer(schedule: Any) -> None:
    def make(parameters: Any) -> Any:
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": others}], lr=0.05, momentum=0.9)

    model, optimizer = prepared(make)
    reference = ByHand(mlp, model, make)
    schedules = schedule(optimizer), schedule(reference.optimizer)
    for batch in batches(10):
        losses = train(model, optimizer, [batch])[0], reference.step(batch)
        assert losses[0] == losses[1]
        for each in schedules:
            each.step(*(losses[:1] if isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau) else ()))
    assert [group["lr"] for group in optimizer.param_groups] != [0.2, 0.05]
    reference.assert_like(model, optimizer)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_group_that_is_added_later_gets_masters(steps: int) -> None:
    model: Any = mlp()
    optimizer: Any = sgd(model[:3].parameters())
    prepare(model, optimizer)
    reference = ByHand(mlp, model, lambda masters: sgd(masters[:4]))
    data = batches(6)
    train(model, optimizer, data[:steps])
    for batch in data[:steps]:
        reference.step(batch)
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.02})
    # Without a gradient PyTorch skips them, in either run.
    reference.masters[4:] = [nn.Parameter(one.detach().float()) for one in reference.low[4:]]
    reference.optimizer.add_param_group({"params": reference.masters[4:], "lr": 0.02})
    assert train(model, optimizer, data[steps:]) == [reference.step(batch) for batch in data[steps:]]
    assert [type(one).__name__ for one in held(optimizer)].count("MasterParameter") == 4
    reference.assert_like(model, optimizer)


def test_a_parameter_that_is_added_a_second_time_is_refused_at_the_step() -> None:
    model, optimizer = prepared(sgd)
    optimizer.add_param_group({"params": [model[0].weight]})
    with pytest.raises(PreparationError, match=r"more than one parameter group, such as one of shape \(16, 6\)"):
        optimizer.step()


@pytest.mark.parametrize("low", [(), "**"], ids=["default", "all low"])
def test_a_weight_norm_trains_as_masters_by_hand_do(low: Any) -> None:
    def net() -> nn.Module:
        model: Any = mlp()
        weight_norm(model[0])
        return model

    model, optimizer = prepared(sgd, net, low=low)
    reference = ByHand(net, model, sgd)
    data = batches(8)
    assert train(model, optimizer, data) == [reference.step(batch) for batch in data]
    reference.assert_like(model, optimizer)
    originals = {model[0].parametrizations.weight.original0.dtype, model[0].parametrizations.weight.original1.dtype}
    assert originals == ({BF16} if low else {torch.float32})


@pytest.mark.parametrize("options", [{}, {"masters": "kahan"}, {"rounding": "stochastic"}], ids=str)
def test_what_the_user_writes_to_a_weight_between_steps_wins(options: dict[str, Any]) -> None:
    model, optimizer = prepared(lambda p: torch.optim.SGD(p, lr=0.125), **options)
    train(model, optimizer, batches(3))
    weight = model[0].weight
    kept = held(optimizer)[0].detach().clone()
    with torch.no_grad():
        weight[0] = 0.75
    weight.grad = torch.zeros_like(weight)
    weight.grad[0] = 1
    optimizer.step()
    assert bool((weight[0] == 0.625).all())
    if not options:
        master = held(optimizer)[0].detach()
        assert bool((master[0] == 0.625).all())
        assert torch.equal(master[1:], kept[1:])


@pytest.mark.parametrize("first", [False, True], ids=["together", "optimizer later"])
def test_what_the_user_writes_to_a_master_between_steps_stays(first: bool) -> None:
    model: Any = mlp()
    if first:
        prepare(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.125)
    prepare(model, optimizer)
    train(model, optimizer, batches(2))
    with torch.no_grad():
        for one in held(optimizer):
            one.fill_(0.3)
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(one.detach(), torch.full_like(one.detach(), 0.3)) for one in held(optimizer))
    assert_rounded(optimizer)
