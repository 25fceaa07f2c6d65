"""Two processes with gloo: all ranks have the same masters, skip the same steps, and accumulate without communication."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.apex import amp
from mezzo.apex import parallel as apex_parallel
from mezzo.apex.amp import casts
from mezzo.errors import AmpError
from tests.torch.scaler_distributed.processes import Ranks, run

pytestmark = pytest.mark.slow  # the first one waits for the processes

STEPS = 10
OVERFLOWS = (2, 5, 6)
"""The steps in which rank 1's data overflow, where that is asked for."""

LEVELS = ["O1", "O2", "O3"]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
WRAPPERS: dict[str, Any] = {"torch": DistributedDataParallel, "apex": apex_parallel.DistributedDataParallel}


def build(*, norm: type[nn.Module] = nn.LayerNorm) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), norm(16), nn.GELU(), nn.Linear(16, 4))  # type: ignore[call-arg]


def batch(step: int, rank: int | None, *, overflow: bool = False) -> tuple[Tensor, Tensor]:
    """Eight rows of 16 for each rank; all of them for None. With ``overflow`` one row of rank 1 has an Inf."""
    generator = torch.Generator().manual_seed(step)
    inputs, labels = torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)
    if overflow:
        inputs[15, 0] = torch.inf
    rows = slice(None) if rank is None else slice(8 * rank, 8 * rank + 8)
    return inputs[rows], labels[rows]


def train(
    model: nn.Module,
    optimizer: Any,
    rank: int | None,
    *,
    micro: int = 1,
    sync: str = "last",
    delay: bool = False,
    overflows: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Train; give masters and scales.

    Args:
        model: Wrapped, or not, where ``rank`` is None.
        optimizer: Its optimizer.
        rank: Of this process; None for one process with all of the data.
        micro: How many blocks there are before each step.
        sync: In which blocks the ranks communicate: the "last" one before a step, or "all".
        delay: Whether all blocks but the last have ``delay_unscale=True``.
        overflows: The steps in whose first block rank 1's data overflow.
    """
    scales, stepped = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro):
            last = part == micro - 1
            silent = rank is not None and not last and sync == "last"
            inputs, labels = batch(step + 100 * part, rank, overflow=step in overflows and part == 0)
            with model.no_sync() if silent else contextlib.nullcontext():  # type: ignore[operator]
                loss = nn.functional.cross_entropy(model(inputs), labels) / micro
                with amp.scale_loss(loss, optimizer, delay_unscale=delay and not last) as scaled:
                    scaled.backward()
        before = [one.detach().clone() for one in amp.master_params(optimizer)]
        optimizer.step()
        after = list(amp.master_params(optimizer))
        stepped.append(any(not torch.equal(*pair) for pair in zip(before, after, strict=True)))
        scales.append(amp._amp_state.loss_scalers[0].loss_scale())
    masters = [one.detach().clone() for one in amp.master_params(optimizer)]
    return {"masters": masters, "scales": scales, "stepped": stepped}


def start(level: str, dtype: str, *, norm: type[nn.Module] = nn.LayerNorm, **options: Any) -> tuple[nn.Module, Any]:
    model = build(norm=norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"loss_scale": "dynamic", **options}
    made: tuple[nn.Module, Any] = amp.initialize(
        model, optimizer, opt_level=level, dtype=DTYPES[dtype], verbosity=0, **options
    )
    return made


def wrapped(
    rank: int,
    level: str,
    dtype: str,
    wrapper: str,
    ddp: dict[str, Any],
    options: dict[str, Any],
    norm: type[nn.Module] = nn.LayerNorm,
) -> dict[str, Any]:
    """One training, in each process."""
    model, optimizer = start(level, dtype, norm=norm)
    try:
        return train(WRAPPERS[wrapper](model, **ddp), optimizer, rank, **options)
    finally:
        casts.stop()


class Check:
    """A function of the rank, with a name of its own."""

    def __init__(self, name: str, function: Callable[..., Any], **arguments: Any) -> None:
        self.__name__, self._function, self._arguments = name, function, arguments

    def __call__(self, rank: int) -> Any:
        return self._function(rank, **self._arguments)


VIEWS = {"gradient_as_bucket_view": True}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (of DDP, of the loop)
    "one block": ({}, {}),
    "one block, views": (VIEWS, {}),
    "overflow": ({}, {"overflows": OVERFLOWS}),
    "overflow, views": (VIEWS, {"overflows": OVERFLOWS}),
    "static graph": ({"static_graph": True}, {}),
    "all blocks in sync": ({}, {"micro": 3, "sync": "all"}),
    "all blocks in sync, views": (VIEWS, {"micro": 3, "sync": "all"}),
    "delayed": ({}, {"micro": 3, "delay": True}),
    "delayed, views": (VIEWS, {"micro": 3, "delay": True}),
    "delayed, overflow": ({}, {"micro": 3, "delay": True, "overflows": OVERFLOWS}),
    "no_sync": ({}, {"micro": 3}),
    "no_sync, views": (VIEWS, {"micro": 3}),
    "no_sync, overflow": ({}, {"micro": 3, "overflows": OVERFLOWS}),
}
APEX_SHAPES = ["one block", "overflow", "delayed", "no_sync"]

CASES = [
    (level, dtype, wrapper, shape)
    for level in LEVELS
    for dtype in DTYPES
    for wrapper in WRAPPERS
    for shape in SHAPES
    if wrapper == "torch" or shape in APEX_SHAPES
]


def name_of(level: str, dtype: str, wrapper: str, shape: str) -> str:
    return "_".join((level, dtype, wrapper, shape)).replace(", ", "_").replace(" ", "_")


def wrapped_before(_rank: int) -> list[str]:
    """What ``initialize`` says of models that are wrapped."""
    said = []
    for wrapper in WRAPPERS.values():
        for level in ("O0", *LEVELS):
            model = wrapper(build())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            try:
                amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            except AmpError as error:
                said.append(str(error))
            assert "_amp_stash" not in vars(optimizer)
            assert all(one.dtype is torch.float32 for one in model.parameters())
    return said


CHECKS = [
    *(
        Check(
            name_of(level, dtype, wrapper, shape),
            wrapped,
            level=level,
            dtype=dtype,
            wrapper=wrapper,
            ddp=SHAPES[shape][0],
            options=SHAPES[shape][1],
        )
        for level, dtype, wrapper, shape in CASES
    ),
    *(
        Check(
            f"{level}_batch_norm",
            wrapped,
            level=level,
            dtype="float16",
            wrapper="torch",
            ddp={},
            options={"overflows": OVERFLOWS},
            norm=nn.BatchNorm1d,
        )
        for level in LEVELS
    ),
    wrapped_before,
]


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return run(__name__)


def alone(level: str, dtype: str, options: dict[str, Any]) -> dict[str, Any]:
    """The same training in one process, with the data of all ranks."""
    model, optimizer = start(level, dtype)
    return train(model, optimizer, None, **options)


def same_on_all(results: list[dict[str, Any]]) -> dict[str, Any]:
    first, second = results
    assert first["scales"] == second["scales"]
    assert first["stepped"] == second["stepped"]
    for one, other in zip(first["masters"], second["masters"], strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
        assert one.isfinite().all()
    return first


@pytest.mark.parametrize(("level", "dtype", "wrapper", "shape"), CASES)
def test_ranks_train_as_one_process_with_all_the_data(
    ranks: Ranks, level: str, dtype: str, wrapper: str, shape: str
) -> None:
    found = same_on_all(ranks[name_of(level, dtype, wrapper, shape)])
    options = SHAPES[shape][1]
    expected = alone(level, dtype, options)
    assert (found["scales"], found["stepped"]) == (expected["scales"], expected["stepped"])
    overflows = options.get("overflows", ())
    assert found["stepped"] == [step not in overflows for step in range(STEPS)]
    assert found["scales"][-1] == 65536.0 / 2 ** len(overflows)
    # Ten steps of lr 0.1 and momentum move weights by some 0.3; gradients are rounded at other places. Without masters
    # each step is rounded to the weights' own digits, which are near 0.3.
    digits = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
    for one, other in zip(found["masters"], expected["masters"], strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.0, atol=digits * (4 if level == "O3" else 1))


@pytest.mark.parametrize("level", LEVELS)
def test_batch_norms_with_statistics_of_their_own_have_the_same_masters(ranks: Ranks, level: str) -> None:
    found = same_on_all(ranks[f"{level}_batch_norm"])
    assert found["stepped"] == [step not in OVERFLOWS for step in range(STEPS)]


def test_a_wrapped_model_is_refused_before_anything_is_changed(ranks: Ranks) -> None:
    for said in ranks["wrapped_before"]:
        assert len(said) == 8
        assert all("DistributedDataParallel" in text and "amp.initialize" in text for text in said)
