"""Prepared models under FSDP2: parameters are sharded in bfloat16, and the optimizer has float32 masters of the shards."""

from __future__ import annotations

import copy
import shutil
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mezzo.errors import PreparationError
from mezzo.torch import GradScaler, autocast, float32_state_dict, master_params, prepare, unprepare
from tests.torch.scaler_distributed.processes import Ranks, run
from tests.torch.scaler_distributed.training import INF, NUMBERS, OVERFLOWS, expected, usual
from tests.torch.scaler_distributed.training import STEPS as SCALED_STEPS

STEPS = 5
LAYERS, NORMS = (0, 3, 6), (1, 4)


def build() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)
    )


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(model: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    with autocast("cpu", dtype=dtype):
        return model(batch(rank, step)).float().square().mean()


def shard(model: nn.Sequential, **policy: Any) -> nn.Sequential:
    """Shard norms by themselves, for a group of FSDP2 has parameters of one dtype; then layers, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for place in NORMS:
        fully_shard(model[place], mesh=mesh)
    for place in LAYERS:
        fully_shard(model[place], mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    return model


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def prepared(
    *, fused: bool = False, policy: dict[str, Any] | None = None, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The recipe: prepare, shard, make the optimizer, prepare with it."""
    model = build()
    dtype = {"dtype": options["dtype"]} if "dtype" in options else {}
    prepare(model, **dtype)
    shard(model, **(policy or {}))
    optimizer = optimizer_of(model, fused=fused)
    prepare(model, optimizer, **options)
    load_whole(model, build().state_dict())
    return model, optimizer


def load_whole(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load float32 weights of the whole model, of which each rank takes its part: masters have them to the last bit."""
    from torch.distributed.tensor import distribute_tensor

    theirs = model.state_dict()
    model.load_state_dict(
        {
            name: distribute_tensor(value, theirs[name].device_mesh, theirs[name].placements)
            for name, value in weights.items()
        }
    )


def whole(tensors: Any) -> list[Tensor]:
    return [(one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone() for one in tensors]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    *,
    first: int = 0,
    steps: int = STEPS,
    clip: bool = False,
    micro: int = 1,
) -> dict[str, Any]:
    seen: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for part in range(micro):
            loss = loss_of(model, rank, step + 50 * part)
            loss.backward()
            seen["losses"].append(loss.item())
        if clip:
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            seen["norms"].append(norm.full_tensor().item())
        optimizer.step()
    seen["masters"] = whole(master_params(optimizer))
    return seen


def plain(*, fused: bool = False, **policy: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """FSDP2's own mixed precision: float32 shards, cast when they are gathered."""
    model = shard(build(), param_dtype=torch.bfloat16, **policy)
    return model, optimizer_of(model, fused=fused)


class Check:
    """A function of the rank, with a name of its own for each set of options."""

    def __init__(self, name: str, function: Any, **options: Any) -> None:
        self.__name__, self._function, self._options = name, function, options

    def __call__(self, rank: int) -> Any:
        return self._function(rank, **self._options)


def described(rank: int) -> dict[str, Any]:
    model = build()
    prepare(model)
    shard(model)
    optimizer = optimizer_of(model)
    prepare(model, optimizer)
    masters = list(master_params(optimizer))
    seen = {
        "classes": {type(one).__mro__[-1].__name__ for one in masters},
        "distributed": [hasattr(one, "placements") for one in masters],
        "dtypes": [str(one.dtype) for one in masters],
        "stored": [str(one.dtype) for one in model.parameters()],
    }
    loss_of(model, rank, 0).backward()
    seen["linked"] = all(one.grad is mine.grad for one, mine in zip(masters, model.parameters(), strict=True))
    optimizer.step()
    rounded = zip(whole(masters), whole(model.parameters()), strict=True)
    seen["rounded"] = all(torch.equal(one.to(mine.dtype), mine) for one, mine in rounded)
    optimizer.zero_grad()
    seen["gone"] = all(one.grad is None for one in (*masters, *model.parameters()))
    optimizer.zero_grad(set_to_none=False)
    seen["float32"] = {name: str(value.dtype) for name, value in float32_state_dict(model).items()}
    return seen


def trained(
    rank: int, *, clip: bool = False, fused: bool = False, compiled: bool = False, **policy: Any
) -> dict[str, Any]:
    ready = prepared(fused=fused, policy=policy, compiled=compiled)
    return {"plain": train(*plain(fused=fused, **policy), rank, clip=clip), "prepared": train(*ready, rank, clip=clip)}


def options(rank: int, **options: Any) -> dict[str, Any]:
    """Other ways to step, next to FSDP2's own mixed precision."""
    model, optimizer = prepared(**options)
    seen = train(model, optimizer, rank)
    return {"plain": train(*plain(), rank), "prepared": {**seen, "weights": whole(model.parameters())}}


def accumulated(rank: int, *, micro: int = 3) -> dict[str, Any]:
    """Sums over ranks in float32; FSDP2 rounds each of them to the dtype of the parameter all the same."""
    policy = {"reduce_dtype": torch.float32}
    return {
        "plain": train(*plain(**policy), rank, micro=micro),
        "prepared": train(*prepared(policy=policy), rank, micro=micro),
    }


def gradients(rank: int) -> dict[str, list[str]]:
    """Dtypes of a low parameter's gradient, after one and two backward passes, in two steps."""
    seen: dict[str, list[str]] = {}
    for grad_dtype in (None, torch.float32, torch.bfloat16):
        model, optimizer = prepared(grad_dtype=grad_dtype)
        seen[str(grad_dtype)] = dtypes = []
        for step in range(4):
            if step % 2 == 0:
                optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            gradient = next(model.parameters()).grad
            assert gradient is not None
            dtypes.append(str(gradient.dtype))
            if step % 2:
                optimizer.step()
    return seen


def round_trip(rank: int, *, model_first: bool) -> list[dict[str, Any]]:
    model, optimizer = prepared()
    train(model, optimizer, rank)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    rest = train(model, optimizer, rank, first=STEPS)
    model, optimizer = prepared()
    if model_first:
        model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    if not model_first:
        model.load_state_dict(saved[0])
    kept = saved[1]["mezzo"]["masters"]
    dtypes = {str(one.dtype) for one in kept.values()}
    return [rest, train(model, optimizer, rank, first=STEPS), {"kept": len(kept), "dtypes": dtypes}]


def scaled(rank: int) -> dict[str, Any]:
    """float16, and the loss of rank 1 overflows."""
    model, optimizer = prepared(dtype=torch.float16)
    scaler = GradScaler("cpu", **NUMBERS)
    seen: dict[str, Any] = {"scale": [], "tracker": [], "moved": []}
    for step in range(SCALED_STEPS):
        optimizer.zero_grad()
        before = whole(master_params(optimizer))
        loss = loss_of(model, rank, step, torch.float16) * (INF if rank == 1 and step in OVERFLOWS else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after = whole(master_params(optimizer))
        seen["moved"].append(any(not torch.equal(one, other) for one, other in zip(before, after, strict=True)))
        seen["scale"].append(scaler.get_scale())
        seen["tracker"].append(scaler._get_growth_tracker())
    return {**seen, "masters": whole(master_params(optimizer))}


def in_files(rank: int) -> list[dict[str, Any]]:
    """A distributed checkpoint of the two state dicts, loaded into another run."""
    import torch.distributed.checkpoint as dcp

    name: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(name)
    model, optimizer = prepared()
    train(model, optimizer, rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's, about its own storage
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=name[0])
        rest = train(model, optimizer, rank, first=STEPS)
        model, optimizer = prepared()
        train(model, optimizer, rank, first=3 * STEPS)  # so that there is a state to load to
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=name[0])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    found = train(model, optimizer, rank, first=STEPS)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(name[0])
    return [rest, found]


def refused(rank: int) -> list[str]:
    model = shard(build())
    texts = []
    try:
        prepare(model)
    except PreparationError as error:
        texts.append(str(error))
    model, optimizer = prepared()
    try:
        unprepare(model, optimizer)
    except PreparationError as error:
        texts.append(str(error))
    train(model, optimizer, rank, steps=1)
    return texts


CHECKS = [
    described,
    trained,
    Check("clipped", trained, clip=True),
    Check("fused", trained, fused=True),
    Check("compiled", trained, compiled=True),
    Check("kahan", options, masters="kahan"),
    Check("stochastic", options, masters=False, rounding="stochastic"),
    Check("masters rounded stochastically", options, rounding="stochastic"),
    Check("summed in float32", accumulated, micro=1),
    accumulated,
    gradients,
    Check("round trip, model first", round_trip, model_first=True),
    Check("round trip, optimizer first", round_trip, model_first=False),
    scaled,
    in_files,
    refused,
]


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return run(__name__)


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Bit for bit."""
    assert found["losses"] == wanted["losses"]
    assert found["norms"] == wanted["norms"]
    for one, other in zip(found["masters"], wanted["masters"], strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


def test_masters_are_float32_shards_that_share_the_gradients_of_the_model(ranks: Ranks) -> None:
    low, kept = ["torch.bfloat16"] * 2, ["torch.float32"] * 2
    for result in ranks["described"]:
        assert result["distributed"] == [True] * 10
        assert result["dtypes"] == ["torch.float32"] * 10
        assert result["stored"] == [*low, *kept, *low, *kept, *low]
        assert result["linked"]
        assert result["rounded"]
        assert result["gone"]
        assert set(result["float32"].values()) == {"torch.float32"}


@pytest.mark.parametrize("name", ["trained", "clipped", "fused", "compiled"])
def test_training_is_that_of_the_mixed_precision_of_fsdp(ranks: Ranks, name: str) -> None:
    for result in ranks[name]:
        assert_equal(result["prepared"], result["plain"])


@pytest.mark.parametrize("name", ["kahan", "stochastic", "masters rounded stochastically"])
def test_other_options_train_alike_on_both_ranks(ranks: Ranks, name: str) -> None:
    first, second = ranks[name]
    for one, other in zip(first["prepared"]["weights"], second["prepared"]["weights"], strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()
    for result in (first, second):
        losses = torch.tensor(result["prepared"]["losses"])
        # Weights are rounded otherwise: 2^-8 each, and steps of Adam with them.
        torch.testing.assert_close(losses, torch.tensor(result["plain"]["losses"]), rtol=0.1, atol=0.0)


@pytest.mark.parametrize("name", ["summed in float32", "accumulated"])
def test_gradients_are_summed_in_float32_but_for_one_rounding(ranks: Ranks, name: str) -> None:
    for result in ranks[name]:
        losses = torch.tensor(result["prepared"]["losses"])
        # Gradients differ by 2^-9 of themselves; where they are near 0, so may the signs of Adam's steps.
        torch.testing.assert_close(losses, torch.tensor(result["plain"]["losses"]), rtol=0.05, atol=0.0)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_checkpoint_of_model_and_optimizer_is_gone_on_from(ranks: Ranks, order: str) -> None:
    for rest, loaded, saved in ranks[f"round trip, {order}"]:
        assert_equal(loaded, rest)
        assert saved == {"kept": 6, "dtypes": {"torch.float32"}}


def test_an_overflow_on_one_rank_makes_all_skip(ranks: Ranks) -> None:
    rule = expected(usual())
    results = ranks["scaled"]
    for result in results:
        assert {key: result[key] for key in rule} == rule
        assert result["moved"] == [step not in OVERFLOWS for step in range(SCALED_STEPS)]
    for one, other in zip(results[0]["masters"], results[1]["masters"], strict=True):
        assert torch.equal(one, other)


def test_a_distributed_checkpoint_is_gone_on_from(ranks: Ranks) -> None:
    for rest, found in ranks["in_files"]:
        assert_equal(found, rest)


def test_gradients_that_are_sums_are_float32(ranks: Ranks) -> None:
    wide, low = ["torch.float32"] * 4, ["torch.bfloat16"] * 4
    for result in ranks["gradients"]:
        # Also the first of a step: it is a sum over ranks.
        assert result == {"None": wide, "torch.float32": wide, "torch.bfloat16": low}


def test_a_sharded_model_is_neither_prepared_from_the_start_nor_undone(ranks: Ranks) -> None:
    for first, second in ranks["refused"]:
        assert "The model is sharded already ('0.weight' is a DTensor). Call prepare(model) first" in first
        assert "then make the optimizer, and prepare(model, optimizer)" in first
        assert "The model is sharded" in second
        assert "float32_state_dict" in second
