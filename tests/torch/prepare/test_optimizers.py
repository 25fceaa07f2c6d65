"""Any optimizer of PyTorch steps float32 masters as if they were kept by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import prepare, unprepare

from .nets import (
    BF16,
    ByHand,
    Make,
    assert_rounded,
    batches,
    everything,
    held,
    loss_of,
    mlp,
    prepared,
    same,
    train,
)

CLASSES = [
    cls
    for name in sorted(vars(torch.optim))
    if isinstance(cls := getattr(torch.optim, name), type) and cls is not torch.optim.Optimizer
]
SPECIAL = {"LBFGS", "SparseAdam", "Muon"}
PLAIN = [cls for cls in CLASSES if cls.__name__ not in SPECIAL]
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    "Adadelta": {"lr": 1.0},
    "RMSprop": {"lr": 0.001, "momentum": 0.9, "centered": True},
}


def _ways() -> list[Any]:
    found = []
    for cls in PLAIN:
        names = cls.__init__.__code__.co_varnames
        for way in ("for-loop", "foreach", "fused"):
            if way != "for-loop" and way not in names:
                continue
            chosen = {} if "foreach" not in names else {"foreach": way == "foreach"}
            if way == "fused":
                chosen = {"fused": True}
            found.append(pytest.param(cls, chosen, id=f"{cls.__name__}-{way}"))
    return found


def _make(cls: Any, **more: Any) -> Make:
    return lambda parameters: cls(parameters, **{"lr": 0.01, **OPTIONS.get(cls.__name__, {}), **more})


def test_no_optimizer_of_torch_is_forgotten() -> None:
    assert {cls.__name__ for cls in PLAIN} >= {"ASGD", "Adafactor", "Adam", "AdamW", "NAdam", "RAdam", "Rprop", "SGD"}


@pytest.mark.parametrize(("cls", "way"), _ways())
def test_an_optimizer_steps_as_over_masters_kept_by_hand(cls: Any, way: dict[str, Any]) -> None:
    make = _make(cls, **way)
    model, optimizer = prepared(make)
    reference = ByHand(mlp, model, make)
    data = batches(6)
    assert train(model, optimizer, data) == [reference.step(batch) for batch in data]
    reference.assert_like(model, optimizer)
    assert_rounded(optimizer)


@pytest.mark.parametrize("cls", PLAIN)
@pytest.mark.parametrize(
    "options",
    [{"masters": "kahan"}, {"masters": False, "rounding": "stochastic"}, {"rounding": "stochastic"}],
    ids=["kahan", "stochastic", "stochastic with masters"],
)
def test_without_masters_an_optimizer_stays_near_them(cls: Any, options: dict[str, Any]) -> None:
    make = _make(cls)
    model, optimizer = prepared(make, **options)
    before = [one.detach().clone() for one in model.parameters()]
    reference = ByHand(mlp, model, make)
    data = batches(6)
    train(model, optimizer, data)
    for batch in data:
        reference.step(batch)
    moved = 0
    for old, low, wide in zip(before, model.parameters(), reference.masters, strict=True):
        # Adam, Rprop and their like step by the sign where a gradient is near 0, by up to lr each; else what is lost is
        # the rounding of a step.
        torch.testing.assert_close(low.detach().float(), wide.detach(), rtol=2**-6, atol=2 * 6 * 0.012)
        moved += int((old != low.detach()).sum())
    assert moved
    assert all(bool(one.isfinite().all()) for one in model.parameters())


def test_muon_steps_matrices() -> None:
    def make(parameters: Any) -> Any:
        return torch.optim.Muon([one for one in parameters if one.ndim == 2], lr=0.02)

    model, optimizer = prepared(make)
    reference = ByHand(mlp, model, make)
    data = batches(6)
    train(model, optimizer, data)
    for batch in data:
        reference.step(batch)
    wide = [one.detach() for one in reference.masters if one.ndim == 2]
    assert same(wide, [one.detach() for one in held(optimizer)])
    assert_rounded(optimizer)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(4, 3)

    def forward(self, index: Tensor) -> Tensor:
        result: Tensor = self.out(self.embedding(index).mean(1))
        return result


INDICES = [torch.tensor([[0, 1, 1], [2, 3, 0]]), torch.tensor([[5, 5, 5], [1, 9, 9]])]


def _bag_loss(model: nn.Module, index: Tensor) -> Tensor:
    return loss_of(model, (index, torch.tensor([0, 2])))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # by PyTorch's Adagrad
@pytest.mark.parametrize("cls", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("twice", [False, True], ids=["alone", "accumulated"])
def test_a_sparse_embedding_stored_low_has_a_master_like_any_other(cls: Any, twice: bool) -> None:
    model: Any = Bag()
    optimizer: Any = cls([model.embedding.weight], lr=0.1)
    start = model.embedding.weight.detach().clone()
    model, optimizer = prepare(model, optimizer, low="embedding")
    assert model.embedding.weight.dtype is BF16
    plain, master = Bag(), nn.Parameter(start)
    plain.embedding.weight.data = start.bfloat16()
    other = cls([master], lr=0.1)
    for index in INDICES * 3:
        optimizer.zero_grad()
        sums = None
        for one in [index, index.flip(0)][: 1 + twice]:
            _bag_loss(model, one).backward()
            plain.embedding.weight.grad = None
            _bag_loss(plain, one).backward()
            assert plain.embedding.weight.grad is not None
            wide = plain.embedding.weight.grad.float()
            sums = wide if sums is None else sums + wide
        master.grad = sums
        optimizer.step()
        other.step()
        plain.embedding.weight.data.copy_(master.data)
    assert torch.equal(held(optimizer)[0].detach(), master.detach())
    assert_rounded(optimizer)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("options", [{}, {"masters": "kahan"}], ids=["masters", "kahan"])
def test_lbfgs_evaluates_the_model_with_the_weights_of_the_moment(search: Any, options: dict[str, Any]) -> None:
    def make(parameters: Any) -> Any:
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=6, line_search_fn=search)

    model, optimizer = prepared(make, **options)
    reference = ByHand(mlp, model, make)
    for batch in batches(3):
        seen: list[list[float]] = [[], []]

        def closure(batch: Any = batch, seen: Any = seen) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            seen[0].append(loss.item())
            return loss

        def by_hand(batch: Any = batch, seen: Any = seen) -> Tensor:
            loss = reference.gradients(batch)
            seen[1].append(loss.item())
            return loss

        got, expected = optimizer.step(closure), reference.optimizer.step(by_hand)
        reference.refresh()
        assert len(set(seen[0])) > 2
        if options:
            # 16 bits instead of 24 stand for a master; after some evaluations the two are different runs.
            torch.testing.assert_close(seen[0][:3], seen[1][:3], rtol=0.02, atol=0)
            return
        assert torch.equal(got, expected)
        assert seen[0] == seen[1]
    reference.assert_like(model, optimizer)
    assert_rounded(optimizer)


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, torch.optim.Adam])
@pytest.mark.parametrize("options", [{}, {"masters": "kahan"}], ids=["masters", "kahan"])
def test_a_closure_that_raises_leaves_everything_as_it_was(cls: Any, options: dict[str, Any]) -> None:
    model, optimizer = prepared(lambda p: cls(p, lr=0.1), **options)
    other, second = prepared(lambda p: cls(p, lr=0.1), **options)
    one, two, three = batches(3)

    def step(model: Any, optimizer: Any, batch: Any) -> float:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        return float(optimizer.step(closure).detach())

    def fails() -> float:
        optimizer.zero_grad()
        loss_of(model, two).backward()
        raise ZeroDivisionError

    step(model, optimizer, one)
    before = everything(model, optimizer)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(fails)
    assert same(before, everything(model, optimizer))
    gradients = [each.grad for each in held(optimizer)]
    assert all(each is low.grad for each, low in zip(gradients, model.parameters(), strict=True))
    optimizer.zero_grad()
    assert all(each.grad is None for each in model.parameters())
    step(other, second, one)
    assert step(model, optimizer, three) == step(other, second, three)
    assert same(everything(model, optimizer), everything(other, second))


def test_a_closure_that_raises_in_a_line_search_leaves_model_and_masters_in_step() -> None:
    model, optimizer = prepared(lambda p: torch.optim.LBFGS(p, lr=0.5, line_search_fn="strong_wolfe"))
    batch, calls, failing = batches(1)[0], list[int](), list[int]()

    def closure() -> Tensor:
        calls.append(1)
        if failing and len(calls) > 2:
            raise ZeroDivisionError
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    optimizer.step(closure)
    calls.clear()
    failing.append(1)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    assert_rounded(optimizer)
    failing.clear()
    assert optimizer.step(closure).item() > 0
    assert_rounded(optimizer)


class Third(torch.optim.Optimizer):
    """An optimizer that is not PyTorch's: sign descent, its closure called where it likes."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    assert one.grad.dtype is torch.float32
                    one.add_(one.grad, alpha=-group["lr"])
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()


def test_an_optimizer_that_is_not_torchs_steps_masters_with_float32_gradients() -> None:
    model, optimizer = prepared(Third)
    reference = ByHand(mlp, model, Third)
    data = batches(6)
    assert train(model, optimizer, data) == [reference.step(batch) for batch in data]
    reference.assert_like(model, optimizer)


def test_state_from_before_goes_along_and_comes_back() -> None:
    make = _make(torch.optim.AdamW)
    plain, model = mlp(), mlp()
    first, optimizer = make(plain.parameters()), make(model.parameters())
    data = batches(9)
    train(plain, first, data[:3])
    train(model, optimizer, data[:3])
    state = [one.clone() for one in everything(model, optimizer)]
    prepare(model, optimizer)
    unprepare(model, optimizer)
    assert same(state, everything(model, optimizer))
    prepare(model, optimizer)
    assert train(model, optimizer, data[3:6]) == train(plain, first, data[3:6])
    unprepare(model, optimizer)
    assert train(model, optimizer, data[6:]) == train(plain, first, data[6:])
    assert same(everything(plain, first), everything(model, optimizer))
