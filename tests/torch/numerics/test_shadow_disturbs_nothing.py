"""A float32 run beside the real one changes nothing of it, and does nothing twice that counts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mezzo.torch import GradScaler, autocast
from mezzo.torch.shadowing.shadow import Shadow
from tests.process_groups import end_process_group

from .following import Following

ADAM: dict[str, Any] = {"lr": 1e-2}


class Net(nn.Module):
    """Dropout, a norm of batches, a recomputed part and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.4)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(torch.relu_(self.first(x))))
        x = checkpoint(self.block, x[None], use_reentrant=False)
        return nn.functional.linear(x, self.first.weight)


def train(context: Any, options: dict[str, Any], *, scale: float) -> tuple[dict[str, Any], Tensor, float]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, **options)
    scaler = GradScaler("cpu", init_scale=scale, growth_interval=2)
    with context:
        for _ in range(3):
            with autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(5, 8)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return copy.deepcopy(model.state_dict()), torch.get_rng_state(), scaler.get_scale()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("scale", [2.0**10, 2.0**24], ids=["finite", "overflow"])
def test_training_is_the_same_bit_for_bit(options: dict[str, Any], scale: float) -> None:
    weights, state, end = train(nullcontext(), options, scale=scale)
    mode = Following()
    got, got_state, got_end = train(mode, options, scale=scale)
    assert [name for name, weight in weights.items() if not torch.equal(weight, got[name])] == []
    assert torch.equal(got_state, state)
    assert got_end == end
    assert any(error for _, errors in mode.errors for error in errors)


def test_a_skipped_step_is_skipped_in_float32_too() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.rand(4))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    scaler = GradScaler("cpu", init_scale=2.0**20)
    with Following() as mode:
        scaler.scale((weight.half() * 3).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert mode.shadow.of(weight) is not None
    # In float32 the gradients are finite: it alone would have made the step.
    assert torch.equal(mode.shadow.of(weight), weight.detach())  # type: ignore[arg-type]


def test_other_modes_see_the_real_ops_only() -> None:
    class Ops(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Ops() as outer, Following():
        (torch.ones(2).bfloat16() / 3).exp_()
    assert outer.seen == ["aten::ones", "aten::_to_copy", "aten::div", "aten::exp_"]


def test_the_float32_run_has_no_graph_and_bumps_no_version() -> None:
    weight = torch.rand(4, requires_grad=True)
    with Following() as mode:
        low = weight.bfloat16() * 1.1
        version = low._version
        low.add_(1)
    own = mode.shadow.of(low)
    assert own is not None
    assert not own.requires_grad
    assert low._version == version + 1
    assert weight._version == 0


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("shadowtest", "FRAGMENT")
    yield library
    library._destroy()


def test_an_op_of_somebody_else_runs_once_and_its_result_is_taken(library: torch.library.Library) -> None:
    calls: list[torch.dtype] = []

    def third(x: Tensor) -> Tensor:
        calls.append(x.dtype)
        return x / 3

    def third_(x: Tensor) -> None:
        calls.append(x.dtype)
        x.div_(3)

    library.define("third(Tensor x) -> Tensor")
    library.define("third_(Tensor(a!) x) -> ()")
    library.impl("third", third, "CPU")
    library.impl("third_", third_, "CPU")
    with Following() as mode:
        low = torch.ones(4).bfloat16() / 7
        out = torch.ops.shadowtest.third(low)
        after = torch.ops.shadowtest.third(low) * 1.0
        torch.ops.shadowtest.third_(low)
    assert calls == [torch.bfloat16] * 3
    assert [errors for name, errors in mode.errors if name == "shadowtest::third"] == [[None], [None]]
    for tensor in (out, after, low):
        assert torch.equal(mode.shadow.of(tensor), tensor.float())  # type: ignore[arg-type]


def test_a_collective_runs_once_and_its_result_is_taken(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with Following() as mode:
            low = torch.ones(4).bfloat16() / 7
            assert mode.shadow.storages == 1
            dist.all_reduce(low)
            assert mode.shadow.storages == 0
        names = [name for name, _ in mode.errors]
    finally:
        end_process_group()
    assert names.count("c10d::allreduce_") == 1


def test_integers_that_an_op_writes_are_written_once() -> None:
    with Following():
        counts = torch.zeros(3, dtype=torch.int64)
        counts.add_(torch.ones(3).bfloat16().long())
        sums = torch.zeros(3, dtype=torch.bool)
        sums.logical_xor_((torch.ones(3) / 3).bfloat16())
    assert counts.tolist() == [1, 1, 1]
    assert sums.tolist() == [True, True, True]


def test_statistics_that_no_schema_calls_written_are_written_once() -> None:
    torch.manual_seed(0)
    low, weight = torch.randn(4, 3).bfloat16(), torch.ones(3)
    plain, followed = (torch.zeros(3), torch.ones(3)), (torch.zeros(3), torch.ones(3))
    torch.native_batch_norm(low, weight, weight, *plain, True, 0.1, 1e-5)
    shadow, func = Shadow(), torch.ops.aten.native_batch_norm.default
    with torch.no_grad():
        args = (low, weight, weight, *followed, True, 0.1, 1e-5)
        ready = shadow.before(func, args, {})
        assert all(torch.equal(*pair) for pair in zip(followed, (torch.zeros(3), torch.ones(3)), strict=True))
        errors = shadow.follow(func, args, {}, func(*args), ready)
    assert all(torch.equal(*pair) for pair in zip(plain, followed, strict=True))
    assert errors[0] is not None
    assert 0 < errors[0] < 0.01


def test_an_op_of_higher_order_passes() -> None:
    shadow, low = Shadow(), torch.ones(2).bfloat16()
    func, args = torch.ops.higher_order.cond, (True, lambda x: x, lambda x: x, (low,))
    ready = shadow.before(func, args, {})
    assert shadow.follow(func, args, {}, (low,), ready) == [None]


class Wrapper(Tensor):
    """A tensor that wraps another."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.inner if isinstance(arg, Wrapper) else arg for arg in args), **(kwargs or {}))


@pytest.mark.parametrize(
    ("make", "work"),
    [
        (lambda low: low.to_sparse(), lambda x: x.coalesce().values() * 2),
        (lambda low: low.to("meta"), lambda x: x.exp_()),
        (Wrapper, lambda x: torch.add(x, x)),
        (lambda low: torch.nested.nested_tensor([low, low], layout=torch.jagged), lambda x: x + x),
        (lambda low: torch.complex(low.float(), low.float()).conj(), lambda x: x.mul_(2)),
    ],
    ids=["sparse", "meta", "wrapper", "nested", "conjugate"],
)
def test_tensors_without_numbers_of_their_own_pass(make: Any, work: Any) -> None:
    low = (torch.ones(3) / 3).bfloat16()
    expected = work(make(low))
    with Following():
        got = work(make((torch.ones(3) / 3).bfloat16()))
    if got.device.type != "meta" and not got.is_nested:
        assert torch.equal(got.resolve_conj(), expected.resolve_conj())
