"""Prepared models under DistributedDataParallel: gradients are summed in float32, and all ranks have the same masters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo.torch
from mezzo.errors import PreparationError
from mezzo.torch import GradScaler, autocast, float32_state_dict, master_params, prepare
from tests.torch.scaler_distributed.processes import Ranks, run
from tests.torch.scaler_distributed.training import INF, NUMBERS, OVERFLOWS, expected, usual
from tests.torch.scaler_distributed.training import STEPS as SCALED_STEPS

STEPS = 6


def build(seed: int = 1) -> nn.Sequential:
    """Linear layers, whose parameters go low, and norms, whose parameters stay float32."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)
    )


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(model: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    with autocast("cpu", dtype=dtype):
        return model(batch(rank, step)).float().square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(
    ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *, micro: int = 1, first: int = 0, steps: int = STEPS
) -> dict[str, Any]:
    """Train; give losses, and what the optimizer holds of each parameter in the end."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for part in range(micro):
            last = part == micro - 1
            with contextlib.nullcontext() if last else ddp.no_sync():  # type: ignore[operator]
                loss = loss_of(ddp, rank, step + 50 * part)
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return {"losses": losses, "masters": [one.detach().clone() for one in master_params(optimizer)]}


class Check:
    """A function of the rank, with a name of its own for each set of options."""

    def __init__(self, name: str, function: Callable[..., Any], **options: Any) -> None:
        self.__name__, self._function, self._options = name, function, options

    def __call__(self, rank: int) -> Any:
        return self._function(rank, **self._options)


def in_bfloat16(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """PyTorch's ``bf16_compress_hook``, which is for NCCL only by its name."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import _compress_hook

    assert bucket.buffer().dtype is torch.float32
    return _compress_hook(torch.bfloat16, dist.group.WORLD, bucket)


# DDP looks at the annotations, and wants classes.
in_bfloat16.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]})


def both(
    rank: int, *, micro: int = 1, options: dict[str, Any] | None = None, hook: bool = False, **ddp: Any
) -> dict[str, Any]:
    """The same training with float32 weights and prepared."""
    seen = {}
    for name in ("float32", "prepared"):
        model = build()
        optimizer = adamw(model)
        if name == "prepared":
            prepare(model, optimizer, **(options or {}))
        wrapped = DistributedDataParallel(model, **ddp)
        if hook:
            wrapped.register_comm_hook(None, in_bfloat16)
        seen[name] = train(wrapped, optimizer, rank, micro=micro)
        seen[name]["gradients"] = [str(one.grad.dtype) for one in model.parameters() if one.grad is not None]
        seen[name]["stored"] = [str(one.dtype) for one in model.parameters()]
    return seen


SMALL = {"bucket_cap_mb": 0.002}  # 2 KiB: each of the larger weights has a bucket of its own
WRAPPED: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
    "buckets": SMALL,
    "bucket views": {**SMALL, "gradient_as_bucket_view": True},
    "static buckets": {**SMALL, "static_graph": True},
    "micro-batches": {"micro": 3},
    "micro-batches, views": {"micro": 3, "gradient_as_bucket_view": True},
    "micro-batches, buckets": {**SMALL, "micro": 2},
    "hook": {"hook": True},
    "hook, buckets": {**SMALL, "hook": True, "gradient_as_bucket_view": True},
    "float32": {"options": {"grad_dtype": torch.float32}},
    "float32 views": {"options": {"grad_dtype": torch.float32}, "gradient_as_bucket_view": True},
    "float32 micro-batches": {"options": {"grad_dtype": torch.float32}, "micro": 2, **SMALL},
}


# Low buckets


class Branching(nn.Module):
    """Of its two branches one is used at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, data: Tensor, second: bool = False) -> Tensor:
        return self.second(data) if second else self.first(data)  # type: ignore[no-any-return]


def unused(rank: int) -> dict[str, Any]:
    """find_unused_parameters with float32 sums, and with low ones."""
    model = Branching()
    optimizer = adamw(model)
    prepare(model, optimizer)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    try:
        loss_of(ddp, rank, 0)
        text = ""
    except PreparationError as error:
        text = str(error)
    model = Branching()
    optimizer = adamw(model)
    prepare(model, optimizer, grad_dtype=torch.bfloat16)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    moved = []
    for step in range(4):
        before = model.second.weight.detach().clone()
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(batch(rank, step), step % 2 == 1).float().square().mean()
        loss.backward()
        optimizer.step()
        moved.append(not torch.equal(before, model.second.weight))
    return {"text": text, "moved": moved, "masters": [one.detach() for one in master_params(optimizer)]}


def never_used(rank: int) -> dict[str, Any]:
    """A branch that is never used, with static_graph=True; float32 weights and prepared."""
    seen = {}
    for name in ("float32", "prepared"):
        model = Branching()
        optimizer = adamw(model)
        if name == "prepared":
            prepare(model, optimizer)
        seen[name] = train(DistributedDataParallel(model, static_graph=True), optimizer, rank)
    return seen


def low_sums(rank: int, *, views: bool) -> list[bool]:
    """Whether reduced gradients are what float additions in bfloat16 give."""
    model = build()
    optimizer = adamw(model)
    prepare(model, optimizer, grad_dtype=torch.bfloat16)
    alone, _ = copy.deepcopy((model, optimizer))
    loss_of(alone, rank, 0).backward()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
    loss_of(ddp, rank, 0).backward()
    equal = []
    for one, mine in zip(model.parameters(), alone.parameters(), strict=True):
        parts = [torch.empty_like(mine.grad) for _ in range(2)]
        dist.all_gather(parts, mine.grad)
        assert one.grad is not None
        equal.append(one.grad.dtype is one.dtype and torch.equal(one.grad, parts[0] / 2 + parts[1] / 2))
    return equal


# Ranks that start apart


def apart(rank: int, **options: Any) -> dict[str, Any]:
    """Each rank starts from weights of its own."""
    model = build(seed=rank)
    optimizer = adamw(model)
    prepare(model, optimizer, **options)
    ddp = DistributedDataParallel(model)
    loss_of(ddp, rank, 0)
    seen = [copy.deepcopy(float32_state_dict(model))]
    for step in range(4):
        train(ddp, optimizer, rank, first=step, steps=1)
        seen.append(copy.deepcopy(float32_state_dict(model)))
    return {"masters": seen, "weights": model.state_dict()}


def apart_then_optimizer(rank: int) -> dict[str, Any]:
    """The optimizer comes after wrapping."""
    model = build(seed=rank)
    prepare(model)
    ddp = DistributedDataParallel(model)
    optimizer = adamw(ddp)
    prepare(model, optimizer)
    seen = train(ddp, optimizer, rank)
    return {**seen, "weights": model.state_dict()}


def loaded_on_all_ranks(rank: int) -> list[dict[str, Any]]:
    """A checkpoint, loaded on all ranks after wrapping: before the first forward and later."""
    model = build()
    optimizer = adamw(model)
    prepare(model, optimizer)
    ddp = DistributedDataParallel(model)
    train(ddp, optimizer, rank)
    saved = copy.deepcopy((ddp.state_dict(), optimizer.state_dict()))
    rest = train(ddp, optimizer, rank, first=STEPS)
    found = [rest]
    for steps, model_first in ((0, True), (0, False), (2, True)):
        model = build(seed=5 + rank)
        optimizer = adamw(model)
        prepare(model, optimizer)
        ddp = DistributedDataParallel(model)
        train(ddp, optimizer, rank, steps=steps)
        # An optimizer goes on with the very tensors that it was given.
        weights, state = copy.deepcopy(saved)
        if model_first:
            ddp.load_state_dict(weights)
        optimizer.load_state_dict(state)
        if not model_first:
            ddp.load_state_dict(weights)
        found.append(train(ddp, optimizer, rank, first=STEPS))
    return found


# Scalers


def scaled(rank: int, *, ready: bool) -> dict[str, Any]:
    """float16, and the loss of rank 1 overflows."""
    model = build()
    optimizer = adamw(model)
    if ready:
        prepare(model, optimizer, dtype=torch.float16)
    ddp = DistributedDataParallel(model)
    scaler = GradScaler("cpu", **NUMBERS)
    seen: dict[str, Any] = {"scale": [], "tracker": [], "losses": []}
    for step in range(SCALED_STEPS):
        optimizer.zero_grad()
        loss = loss_of(ddp, rank, step, torch.float16)
        scaler.scale(loss * (INF if rank == 1 and step in OVERFLOWS else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen["losses"].append(loss.item())
        seen["scale"].append(scaler.get_scale())
        seen["tracker"].append(scaler._get_growth_tracker())
    return {**seen, "masters": [one.detach().clone() for one in master_params(optimizer)]}


def scaled_both(rank: int) -> dict[str, Any]:
    return {"float32": scaled(rank, ready=False), "prepared": scaled(rank, ready=True)}


CHECKS = [
    *(Check(f"both {name}", both, **options) for name, options in WRAPPED.items()),
    unused,
    never_used,
    Check("low_sums", low_sums, views=False),
    Check("low_sums views", low_sums, views=True),
    Check("apart True", apart),
    Check("apart kahan", apart, masters="kahan"),
    Check("apart stochastic", apart, masters=False, rounding="stochastic"),
    Check("apart kahan stochastic", apart, masters="kahan", rounding="stochastic"),
    Check("apart low", apart, grad_dtype=torch.bfloat16),
    Check("apart none", apart, masters=False),
    apart_then_optimizer,
    loaded_on_all_ranks,
    scaled_both,
]


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return run(__name__)


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Bit for bit."""
    assert found["losses"] == wanted["losses"]
    for one, other in zip(found["masters"], wanted["masters"], strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


def assert_same_masters(results: list[Any]) -> None:
    for one, other in zip(results[0]["masters"], results[1]["masters"], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", WRAPPED)
def test_a_prepared_model_trains_as_with_float32_weights(ranks: Ranks, name: str) -> None:
    results = ranks[f"both {name}"]
    for result in results:
        # Both sum the same float32 numbers: gradients in bfloat16, of two ranks, and two addends commute.
        assert_equal(result["prepared"], result["float32"])
        assert set(result["prepared"]["gradients"]) == {"torch.float32"}
        assert result["prepared"]["stored"].count("torch.bfloat16") == 6
    assert_same_masters([result["prepared"] for result in results])
    assert results[0]["prepared"]["losses"] != results[1]["prepared"]["losses"], "the ranks have data of their own"


def test_unused_parameters_are_refused_with_advice_unless_gradients_are_low(ranks: Ranks) -> None:
    for result in ranks["unused"]:
        assert "static_graph=True instead of find_unused_parameters" in result["text"]
        assert "grad_dtype=dtype" in result["text"]
        # Adam's momentum moves the other branch too once it has state; DDP leaves its gradient alone until then.
        assert result["moved"][:2] == [False, True]
    assert_same_masters(ranks["unused"])


def test_a_static_graph_may_leave_parameters_unused(ranks: Ranks) -> None:
    for result in ranks["never_used"]:
        assert_equal(result["prepared"], result["float32"])
    assert_same_masters([result["prepared"] for result in ranks["never_used"]])


@pytest.mark.parametrize("name", ["low_sums", "low_sums views"])
def test_low_gradients_are_averaged_in_bfloat16(ranks: Ranks, name: str) -> None:
    assert ranks[name] == [[True] * 10] * 2


@pytest.mark.parametrize("name", ["True", "kahan", "stochastic", "kahan stochastic", "low", "none"])
def test_ranks_that_start_apart_have_the_masters_of_rank_0_and_stay_together(ranks: Ranks, name: str) -> None:
    first, second = ranks[f"apart {name}"]
    for mine, theirs in zip(first["masters"], second["masters"], strict=True):
        for key in mine:
            assert mine[key].dtype is torch.float32
            assert torch.equal(mine[key], theirs[key]), key
    for key in first["weights"]:
        assert torch.equal(first["weights"][key], second["weights"][key]), key
    if name in ("True", "low"):
        original = build(seed=0).state_dict()
        assert all(torch.equal(value, original[key]) for key, value in second["masters"][0].items())
    if name in ("kahan", "kahan stochastic"):
        original = build(seed=0).state_dict()
        for key, value in second["masters"][0].items():
            # Two bfloat16 numbers hold 16 bits together.
            torch.testing.assert_close(value, original[key], rtol=2.0**-16, atol=0.0)


def test_an_optimizer_may_come_after_wrapping(ranks: Ranks) -> None:
    first, second = ranks["apart_then_optimizer"]
    assert_same_masters([first, second])
    for key in first["weights"]:
        assert torch.equal(first["weights"][key], second["weights"][key]), key


def test_a_checkpoint_loaded_on_all_ranks_is_gone_on_from(ranks: Ranks) -> None:
    for rest, *loaded in ranks["loaded_on_all_ranks"]:
        for one in loaded:
            assert_equal(one, rest)


def test_an_overflow_on_one_rank_makes_all_skip(ranks: Ranks) -> None:
    results = ranks["scaled_both"]
    rule = expected(usual())
    for result in results:
        assert_equal(result["prepared"], result["float32"])
        assert {key: result["prepared"][key] for key in rule} == rule
    assert_same_masters([result["prepared"] for result in results])


def test_the_error_for_a_wrapped_model_says_what_to_do() -> None:
    parallel = nn.DataParallel(nn.Linear(2, 2))
    with pytest.raises(PreparationError, match=r"before it is wrapped: model, optimizer = prepare\(model, optimizer\)"):
        mezzo.torch.prepare(parallel)
