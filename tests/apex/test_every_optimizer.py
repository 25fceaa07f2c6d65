"""Every optimizer of PyTorch trains at O2, and a skipped step leaves its state as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.apex import amp

from .loops import alike, copies, same
from .nets import backward, loss_of, net, plant, scale

CLASSES = [
    cls
    for name in sorted(vars(torch.optim))
    if isinstance(cls := getattr(torch.optim, name), type) and cls is not torch.optim.Optimizer
]
SPECIAL = {"LBFGS", "Muon", "SparseAdam"}
PLAIN = [cls for cls in CLASSES if cls.__name__ not in SPECIAL]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1}],
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "Adadelta": [{"lr": 1.0}],
}
WEIGHT_DECAY = {"weight_decay": 0.01}


def _ways() -> list[Any]:
    found = []
    for cls in PLAIN:
        names = cls.__init__.__code__.co_varnames
        for options in OPTIONS.get(cls.__name__, [{}]):
            for way in ("for-loop", "foreach", "fused"):
                if way != "for-loop" and way not in names:
                    continue
                chosen: dict[str, Any] = {} if "foreach" not in names else {"foreach": way == "foreach"}
                if way == "fused":
                    chosen = {"fused": True}
                decay = WEIGHT_DECAY if "weight_decay" in names else {}
                name = "-".join([cls.__name__, *map(str, options), way])
                found.append(pytest.param(cls, {"lr": 0.01, **decay, **options, **chosen}, id=name))
    return found


WAYS = _ways()


def _start(cls: Any, options: dict[str, Any], level: str = "O2") -> tuple[nn.Module, Any]:
    model = net()
    optimizer = cls(model.parameters(), **options)
    made: tuple[nn.Module, Any] = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    return made


def everything(model: nn.Module, optimizer: Any) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """All that a step may change: weights, masters, and the optimizer's state and numbers, as copies."""
    state = optimizer.state_dict()
    tensors = copies([*model.parameters(), *amp.master_params(optimizer)])
    return tensors, copy.deepcopy([state["state"], state["param_groups"]])


def assert_unchanged(model: nn.Module, optimizer: Any, before: Any) -> None:
    assert alike(everything(model, optimizer), before)


def _train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_no_optimizer_of_torch_is_forgotten() -> None:
    assert {cls.__name__ for cls in PLAIN} >= {"ASGD", "Adafactor", "Adam", "AdamW", "NAdam", "RAdam", "Rprop", "SGD"}


@pytest.mark.parametrize(("cls", "options"), WAYS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_it_trains_as_in_float32(level: str, cls: Any, options: dict[str, Any]) -> None:
    plain = net()
    reference = cls(plain.parameters(), **options)
    wanted = []
    for _ in range(10):
        reference.zero_grad()
        loss = loss_of(plain)
        loss.backward()
        reference.step()
        wanted.append(loss.item())
    model, optimizer = _start(cls, options, level)
    found = _train(model, optimizer, 10)
    assert scale() == 65536.0
    assert found[-1] < found[0]
    # Losses near 1.5. Optimizers that step by the sign of a gradient take another way where it is near 0.
    assert found == pytest.approx(wanted, abs=2e-2)


@pytest.mark.parametrize(("cls", "options"), WAYS)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("first", [0, 3], ids=["as the first", "after three"])
def test_a_skipped_step_leaves_everything_bit_for_bit(
    first: int, level: str, cls: Any, options: dict[str, Any]
) -> None:
    model, optimizer = _start(cls, options, level)
    _train(model, optimizer, first)
    optimizer.zero_grad()
    backward(model, optimizer, overflow=True)
    before = everything(model, optimizer)
    assert optimizer.step() is None
    assert_unchanged(model, optimizer, before)
    assert scale() == 32768.0
    assert _train(model, optimizer, 1)
    assert not same(everything(model, optimizer)[0], before[0])
    assert all(bool(one.isfinite().all()) for one in everything(model, optimizer)[0])


@pytest.mark.parametrize(("cls", "options"), WAYS)
def test_after_a_skipped_step_it_goes_on_as_if_that_had_not_been(cls: Any, options: dict[str, Any]) -> None:
    """The state that an optimizer makes at its first step is that of a first step which was made."""
    runs = []
    for skips in (False, True):
        model, optimizer = _start(cls, options)
        for bad in (True, False, True, False):
            if bad and not skips:
                continue
            optimizer.zero_grad()
            backward(model, optimizer, overflow=bad)
            optimizer.step()
            if bad:
                model[1].reset_running_stats()  # type: ignore[operator, union-attr, index]
                amp._amp_state.loss_scalers[0]._loss_scale = 65536.0
        runs.append(everything(model, optimizer))
    assert alike(runs[0], runs[1])


# Those that need more


def _muon(level: str) -> tuple[nn.Module, Any]:
    model = net()
    optimizer = torch.optim.Muon([one for one in model.parameters() if one.ndim == 2], lr=0.02)
    made: tuple[nn.Module, Any] = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    return made


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("first", [0, 3], ids=["as the first", "after three"])
def test_muon_trains_and_skips(first: int, level: str) -> None:
    model, optimizer = _muon(level)
    _train(model, optimizer, first)
    backward(model, optimizer, overflow=True)
    before = everything(model, optimizer)
    optimizer.step()
    assert_unchanged(model, optimizer, before)
    losses = _train(model, optimizer, 8)
    assert losses[-1] < losses[0]


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(4, 3)

    def forward(self, index: Tensor) -> Tensor:
        result: Tensor = self.out(self.embedding(index).mean(1))
        return result


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("first", [0, 2], ids=["as the first", "after two"])
def test_sparse_adam_trains_and_skips(first: int, level: str) -> None:
    model = Bag()
    optimizers = [
        torch.optim.SparseAdam(list(model.embedding.parameters()), lr=0.05),
        torch.optim.SGD(model.out.parameters(), lr=0.05),
    ]
    amp.initialize(model, optimizers, opt_level=level, loss_scale="dynamic", verbosity=0)
    index, labels = torch.tensor([[0, 1, 1], [2, 3, 0]]), torch.tensor([0, 2])

    def step(*, overflow: bool = False) -> float:
        for each in optimizers:
            each.zero_grad()
        loss = nn.functional.cross_entropy(model(index), labels)
        with amp.scale_loss(loss, optimizers) as scaled:
            scaled.backward()
            if overflow:
                plant_sparse(model.embedding.weight)
        for each in optimizers:
            each.step()
        return loss.item()

    for _ in range(first):
        step()
    before = [everything(model, each) for each in optimizers]
    step(overflow=True)
    for each, seen in zip(optimizers, before, strict=True):
        assert_unchanged(model, each, seen)
    assert scale() == 32768.0
    losses = [step() for _ in range(6)]
    assert losses[-1] < losses[0]
    assert torch.equal(model.embedding.weight[9], Bag().embedding.weight[9].to(model.embedding.weight.dtype))


def plant_sparse(parameter: Tensor) -> None:
    assert parameter.grad is not None
    assert parameter.grad.is_sparse
    parameter.grad._values()[0, 0] = torch.inf


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_lbfgs_trains_with_its_closure_and_skips(level: str, search: str | None) -> None:
    model = net()
    made = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=search)
    model, optimizer = amp.initialize(model, made, opt_level=level, loss_scale=1024.0, verbosity=0)
    values: list[float] = []

    def closure(*, overflow: bool = False) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            if overflow:
                plant(optimizer)
        values.append(loss.item())
        return loss

    before = everything(model, optimizer)
    optimizer.step(lambda: closure(overflow=True))
    assert_unchanged(model, optimizer, before)
    for _ in range(3):
        optimizer.step(closure)
    assert values[-1] < values[1] - 0.3
    before, evaluations = everything(model, optimizer), len(values)
    optimizer.step(lambda: closure(overflow=len(values) == evaluations + 1))
    assert len(values) > evaluations + 1
    assert_unchanged(model, optimizer, before)
