"""Rounding writes to tensors in place: of any layout, in shards, or not at all where the step is skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.torch.masters.rounding import may_come_from, round_nearest_, round_stochastic_, split_, widen_
from tests.process_groups import end_process_group

from .rounding_values import LOW, ROUNDING, bits, junk, split, stochastic, widened

# Skipping


@LOW
@pytest.mark.parametrize("flag", [1.0, 4.0])
def test_a_skipped_rounding_leaves_every_bit(dtype: torch.dtype, flag: float) -> None:
    low, compensation = junk((5000,), dtype), junk((5000,), dtype)
    before, skip, wide = (bits(low).clone(), bits(compensation).clone()), torch.tensor(flag), torch.randn(5000)
    round_stochastic_([low], [wide], seed=0, count=0, skip=skip)
    split_([low], [compensation], [wide], skip=skip)
    split_([low], [compensation], [wide], seed=0, count=0, skip=skip)
    assert torch.equal(bits(low), before[0])
    assert torch.equal(bits(compensation), before[1])


@LOW
@ROUNDING
def test_a_flag_that_is_zero_skips_nothing(dtype: torch.dtype, seed: int | None) -> None:
    wide, skip = torch.randn(5000), torch.zeros(())
    for one, other in zip(split(wide, dtype, seed), split(wide, dtype, seed, skip), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(stochastic(wide, dtype), stochastic(wide, dtype, skip=skip))


class NoHostReads(TorchDispatchMode):
    """Fails where a value is read from a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@LOW
def test_no_value_is_read_by_the_host(dtype: torch.dtype) -> None:
    low, compensation = junk((9,), dtype), junk((9,), dtype)
    wide, skip = torch.randn(9), torch.zeros(())
    with pytest.raises(AssertionError), NoHostReads():
        skip.item()
    with NoHostReads():
        round_nearest_([low], [wide])
        round_stochastic_([low], [wide], seed=0, count=0, skip=skip)
        split_([low], [compensation], [wide], skip=skip)
        split_([low], [compensation], [wide], seed=1)
        widen_([wide], [low], [compensation])
        may_come_from(low, wide)


# Layouts

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda base: base.view(4, 6, 5, 8),
    "channels_last": lambda base: base.view(4, 6, 5, 8).to(memory_format=torch.channels_last),
    "transposed": lambda base: base.view(40, 24).t(),
    "strided": lambda base: base[::3],
    "zero_dim": lambda base: base[7],
    "empty": lambda base: base[:0],
}


@LOW
@pytest.mark.parametrize("wide_layout", LAYOUTS)
@pytest.mark.parametrize("low_layout", LAYOUTS)
def test_any_layout_is_written_in_place(dtype: torch.dtype, low_layout: str, wide_layout: str) -> None:
    low = LAYOUTS[low_layout](junk((960,), dtype))
    wide = LAYOUTS[wide_layout](torch.randn(960, generator=torch.Generator().manual_seed(4)))
    if low.shape != wide.shape:
        wide = torch.randn(low.shape, generator=torch.Generator().manual_seed(4))
    address, strides, compensation = low.data_ptr(), low.stride(), torch.empty_like(low)
    round_stochastic_([low], [wide], seed=0, count=0)
    assert may_come_from(low, wide).all()
    assert may_come_from(low, wide).shape == low.shape
    split_([low], [compensation], [wide])
    assert torch.equal(low, wide.to(dtype))
    torch.testing.assert_close(widened(low, compensation), wide, rtol=2.0**-17, atol=2.0**-25)
    assert (low.data_ptr(), low.stride()) == (address, strides)


LARGE: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda base: base.view(7, 50, 20, 30),
    "channels_last": lambda base: base.view(7, 20, 30, 50).permute(0, 3, 1, 2),
    "transposed": lambda base: base.view(30, 20, 50, 7).permute(3, 2, 1, 0),
}


@LOW
@pytest.mark.parametrize("wide_layout", LARGE)
@pytest.mark.parametrize("low_layout", LARGE)
def test_large_tensors_of_any_layout_are_written_in_full(dtype: torch.dtype, low_layout: str, wide_layout: str) -> None:
    low = LARGE[low_layout](junk((210_000,), dtype))  # more than the 2**16 elements of a block
    wide = LARGE[wide_layout](torch.randn(210_000, generator=torch.Generator().manual_seed(4)))
    compensation = torch.zeros_like(low)
    round_stochastic_([low], [wide], seed=0, count=0)
    assert may_come_from(low, wide).all()
    assert (low != wide.to(dtype)).any()
    split_([low], [compensation], [wide], seed=0, count=0)
    assert may_come_from(low, wide).all()
    torch.testing.assert_close(widened(low, compensation), wide, rtol=2.0**-16, atol=2.0**-25)


@LOW
def test_what_lies_between_the_elements_is_left_alone(dtype: torch.dtype) -> None:
    base = junk((300,), dtype)
    between = bits(base)[1::3].clone()
    round_stochastic_([base[::3]], [torch.ones(100)], seed=0, count=0)
    assert torch.equal(bits(base)[1::3], between)
    assert (base[::3] == 1).all()


@LOW
def test_parameters_are_written_without_a_graph(dtype: torch.dtype) -> None:
    low = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    master = torch.nn.Parameter(torch.randn(3))
    round_nearest_([low], [master])
    round_stochastic_([low], [master], seed=0, count=0)
    split_([low], [torch.zeros_like(low)], [master])
    widen_([master], [low], None)
    assert low.grad_fn is None
    assert not may_come_from(low, master).requires_grad
    assert torch.equal(master, low.float())


# Shards


@pytest.fixture
def shards(tmp_path: Any) -> Any:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    end_process_group()


def test_of_distributed_tensors_the_local_shards_are_rounded(shards: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard

    plain = torch.randn(30, 4, generator=torch.Generator().manual_seed(6))
    wide = DTensor.from_local(plain, shards, [Shard(0)])
    low, compensation = (
        DTensor.from_local(torch.zeros(30, 4, dtype=torch.bfloat16), shards, [Shard(0)]) for _ in range(2)
    )
    skip = torch.zeros(())
    round_stochastic_([low], [wide], seed=1, count=2, skip=skip)
    assert torch.equal(low.to_local(), stochastic(plain, torch.bfloat16, 1, 2))
    assert may_come_from(low, wide).all()
    split_([low], [compensation], [wide], seed=1, count=5, skip=skip)
    expected = split(plain, torch.bfloat16, 1)
    assert torch.equal(low.to_local(), expected[0])
    assert torch.equal(compensation.to_local(), expected[1])
    widen_([wide], [low], [compensation])
    assert torch.equal(wide.to_local(), widened(*expected))
    round_nearest_([low], [wide])
    assert torch.equal(low.to_local(), wide.to_local().bfloat16())
