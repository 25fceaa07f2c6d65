"""Casting several models, with optimizers of all kinds: who is given masters, and what O3 steps in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from mezzo.apex.amp._amp_state import master_params
from mezzo.errors import AmpError
from mezzo.torch.masters.params import Master, masters_in
from mezzo.torch.masters.preparation import preparation_of

from .cast_nets import FULL, HALF, LOWS, adam, initialize, mlp, net, sgd, train_step


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_several_models_and_optimizers_as_gans_have_them(level: str) -> None:
    models = [mlp(1), mlp(2)]
    optimizers = [sgd(models[0]), sgd(models[1])]
    initialize(models, optimizers, level)
    for model, optimizer in zip(models, optimizers, strict=True):
        other = models[1 - models.index(model)]
        still = [one.detach().clone() for one in other.parameters()]
        before = [one.detach().clone() for one in model.parameters()]
        train_step(model, optimizer)
        assert all(torch.equal(one, old) for one, old in zip(other.parameters(), still, strict=True))
        assert not any(torch.equal(one, old) for one, old in zip(model.parameters(), before, strict=True))
    if level == "O2":
        assert masters_in(optimizers[0])[0].owner is not masters_in(optimizers[1])[0].owner


@pytest.mark.parametrize("dtype", LOWS)
def test_models_with_one_optimizer_are_each_as_if_alone(dtype: torch.dtype) -> None:
    models = [mlp(1), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))]
    optimizer = adam(*models)
    initialize(models, optimizer, dtype=dtype)
    assert len(masters_in(optimizer)) == 6
    for model in models:
        train_step(model, optimizer)
        assert torch.equal(
            model[0].weight, next(one for one in masters_in(optimizer) if one.model_param is model[0].weight).to(dtype)
        )
        # What is written to masters by hand reaches each model with its next forward pass.
        with torch.no_grad():
            for one in masters_in(optimizer):
                one.zero_()
        model(torch.rand(3, 4))
        assert not bool(model[0].weight.any())


def test_each_of_them_has_a_record_of_its_own() -> None:
    models = [mlp(1), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True))]
    initialize(models, sgd(*models))
    first, second = (preparation_of(model) for model in models)
    assert first is not None
    assert second is not None
    assert list(first.stored) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert second.mastered == ("0.weight", "0.bias")
    assert list(second.kept) == ["1.weight", "1.bias"]
    assert second.buffers == ("2.running_mean", "2.running_var")
    assert set(second.stored) == {"0.weight", "0.bias", *second.buffers}


def test_a_model_and_a_part_of_it_may_both_be_given() -> None:
    model = mlp()
    optimizer = sgd(model)
    initialize([model, model[2], model], optimizer)
    assert model[2](torch.rand(1, 8)).dtype is FULL
    assert model(torch.rand(1, 4)).dtype is FULL
    assert len(masters_in(optimizer)) == 4


def test_an_optimizer_may_have_parameters_of_others_and_of_no_model() -> None:
    model, stranger = mlp(), nn.Parameter(torch.ones(2))
    other = nn.Linear(2, 2)
    both, foreign = torch.optim.SGD([*model.parameters(), stranger], lr=0.1), sgd(other)
    initialize(model, [both, foreign])
    assert both.param_groups[0]["params"][-1] is stranger
    assert len(masters_in(both)) == 4
    assert foreign.param_groups[0]["params"] == [other.weight, other.bias]
    assert other.weight.dtype is FULL
    stranger.grad = torch.ones(2)
    train_step(model, foreign)
    both.step()
    assert torch.equal(stranger.detach(), torch.full((2,), 0.9))


def test_groups_of_an_optimizer_keep_their_order_and_options() -> None:
    model = net()
    norms = [*model.batch.parameters(), *model.layer.parameters()]
    rest = [one for one in model.parameters() if all(one is not norm for norm in norms)]
    optimizer = torch.optim.SGD([{"params": norms, "lr": 0.5}, {"params": rest}], lr=0.1)
    initialize(model, optimizer)
    held = [
        [one.model_param if isinstance(one, Master) else one for one in each["params"]]
        for each in optimizer.param_groups
    ]
    assert all(one is other for one, other in zip([*held[0], *held[1]], [*norms, *rest], strict=True))
    assert [each["lr"] for each in optimizer.param_groups] == [0.5, 0.1]
    assert all(one is other for one, other in zip(held[0][:2], optimizer.param_groups[0]["params"][:2], strict=True))


class Larc:
    """Wraps an optimizer, as Apex's LARC does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optim = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    def step(self) -> None:
        self.optim.step()


class Bare:
    """Has what an optimizer has, and is none."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups = [{"params": list(model.parameters())}]

    def step(self) -> None:
        pass


def test_the_optimizer_in_a_wrapper_is_given_the_masters() -> None:
    model = mlp()
    wrapper = Larc(sgd(model))
    initialize(model, wrapper)
    assert len(masters_in(wrapper.optim)) == 4


def test_what_is_no_optimizer_can_have_no_masters() -> None:
    model = mlp()
    with pytest.raises(AmpError, match=r"Bare is no torch.optim.Optimizer and holds none as `optim`.*opt_level='O1'"):
        initialize(model, Bare(model))
    assert model[0].weight.dtype is FULL
    initialize(model, Bare(model), "O3")
    assert model[0].weight.dtype is HALF
    other = mlp()
    initialize(other, [sgd(other), Bare(nn.Linear(2, 2))])
    assert other[0].weight.dtype is HALF


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_o3_steps_in_float32_where_float16_would_make_nan(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    models = [mlp(1), mlp(2)]
    optimizers = [kind(models[0].parameters(), lr=1e-2), sgd(models[1])]
    initialize(models, optimizers, "O3")
    assert f"{kind.__name__} cannot compute on weights in torch.float16" in capsys.readouterr().out
    losses = [train_step(models[0], optimizers[0]).square().mean().item() for _ in range(30)]
    assert losses[-1] < losses[0] / 2
    assert all(one.dtype is HALF and bool(one.isfinite().all()) for one in models[0].parameters())
    assert [one.dtype for one in master_params(optimizers[0])] == [HALF] * 4
    assert not masters_in(optimizers[1])
    train_step(models[1], optimizers[1])


def test_o3_steps_where_a_fused_kernel_would_do_nothing() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    initialize(model, optimizer, "O3")
    before = model[0].weight.detach().clone()
    train_step(model, optimizer)
    assert not torch.equal(model[0].weight, before)


def test_o3_says_nothing_where_the_optimizer_can_compute(capsys: pytest.CaptureFixture[str]) -> None:
    model = mlp()
    optimizer = adam(model, eps=1e-4)
    initialize(model, optimizer, "O3")
    assert capsys.readouterr().out == ""
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    train_step(model, optimizer)
    assert bool(model[0].weight.isfinite().all())


@pytest.mark.parametrize(
    "model", [nn.ReLU(), nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False, track_running_stats=False)]
)
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_models_with_little_to_cast_are_taken(model: nn.Module, level: str) -> None:
    model = copy.deepcopy(model)
    initialize(model, level=level)
    assert model(torch.rand(3, 2)).dtype is FULL


@pytest.mark.parametrize("dtype", LOWS)
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_a_model_in_lower_precision_is_brought_to_the_level(dtype: torch.dtype, level: str) -> None:
    model = mlp().to(dtype)
    values = model[0].weight.detach().float()
    optimizer = sgd(model)
    initialize(model, optimizer, level)
    assert model[0].weight.dtype is (FULL if level == "O0" else HALF)
    first = next(iter(master_params(optimizer)))
    assert first.dtype is (HALF if level == "O3" else FULL)
    # From bfloat16 to float16 what is below 2^-14 loses bits.
    torch.testing.assert_close(first.float(), values, atol=2**-24, rtol=0)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_model_computes_and_trains_as_the_model(fullgraph: bool) -> None:
    torch.compiler.reset()
    model, twin = mlp(), mlp()
    optimizer, its_own = sgd(model), sgd(twin)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    initialize(compiled, optimizer)
    initialize(twin, its_own)
    for step in range(3):
        assert torch.equal(train_step(compiled, optimizer, step), train_step(twin, its_own, step))
    assert model[0].weight.dtype is HALF
    assert model(torch.rand(1, 4)).dtype is FULL
    assert set(model.state_dict()) == set(twin.state_dict())
    assert model.state_dict()["0.weight"].dtype is FULL
    torch.compiler.reset()
