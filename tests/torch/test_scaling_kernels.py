"""The Python kernels of gradient scaling: PyTorch's own CPU kernels, to the last bit, and without a host read."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mezzo.torch
from mezzo import Policy
from mezzo.torch import scaling_kernels
from mezzo.torch.scaling_kernels import non_finite_check_and_unscale_, update_scale_

from .kernel_pairs import PATTERNS, UNSCALES, UPDATES, bits, float32, int32

INF, NAN = float("inf"), float("nan")
NOTABLE = {
    dtype: [0.0, -0.0, 1.0, -3.0, INF, -INF, NAN, info.max, -info.max, info.tiny, info.smallest_normal / 2, info.eps]
    for dtype, info in ((dtype, torch.finfo(dtype)) for dtype in PATTERNS)
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda flat: flat,
    "transposed": lambda flat: flat.repeat(2).view(2, -1).t(),
    "every second": lambda flat: torch.stack([flat, torch.ones_like(flat)], dim=1)[:, 0],
    "no dimension": lambda flat: flat[:1].sum(),
    "expanded by one": lambda flat: flat.unsqueeze(0).expand(1, -1),
    "transposed, a stride of 0": lambda flat: flat.repeat(2).as_strided((1, len(flat), 2), (0, 1, max(len(flat), 1))),
}


@st.composite
def gradients(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(list(PATTERNS)))
    width = dtype.itemsize * 8
    pattern = st.integers(-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    numbers = draw(st.lists(st.one_of(st.sampled_from(NOTABLE[dtype]), pattern), max_size=40))
    parts = [
        torch.tensor([one], dtype=dtype)
        if isinstance(one, float)
        else torch.tensor([one], dtype=PATTERNS[dtype]).view(dtype)
        for one in numbers
    ]
    return LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](torch.cat([torch.empty(0, dtype=dtype), *parts]))


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor, strides included."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(tensor)


any_float32 = st.floats(width=32)
inverses = st.one_of(st.integers(-149, 127).map(lambda power: 2.0**power), any_float32)
SHAPES = [(), (1,), (1, 1, 1)]
shapes = st.sampled_from(SHAPES)


@settings(max_examples=300, deadline=None)
@given(st.lists(gradients(), max_size=5), inverses, st.sampled_from([0.0, 1.0, 5.0, NAN]), shapes, shapes)
@example([torch.tensor([INF, 1.0])], 0.0, 0.0, (), ())
@example([torch.tensor([NAN, 1.0])], 1.0, 0.0, (), ())
@example([torch.tensor([3e38]), torch.tensor([6e4], dtype=torch.float16)], 2.0, 0.0, (), ())
@example([torch.tensor([1.0])], INF, 0.0, (), ())
@example([torch.tensor([1.0])], NAN, 0.0, (), ())
def test_gradients_and_flag_are_those_of_pytorchs_kernel(scaled, inverse, flag, flag_shape, inverse_shape):
    results = {}
    for name, unscale in UNSCALES.items():
        mine = [copied(gradient) for gradient in scaled]
        found, factor = torch.full(flag_shape, flag), torch.full(inverse_shape, inverse)
        assert unscale(mine, found, factor) is None
        results[name] = [bits(tensor) for tensor in (*mine, found, factor)]
    assert results["mezzo"] == results["pytorch"]


@pytest.mark.parametrize("dtype", PATTERNS, ids=str)
def test_each_notable_number_raises_the_flag_or_not_as_with_pytorch(dtype):
    for number in NOTABLE[dtype]:
        flags = []
        for unscale in UNSCALES.values():
            found = torch.zeros(())
            unscale([torch.tensor([1.0, number], dtype=dtype)], found, float32(0.5))
            flags.append(found.item())
        assert flags[0] == flags[1] == float(number in (INF, -INF) or number != number)


class Products(TorchDispatchMode):
    """Note the dtypes in which numbers are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul_.Tensor:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_no_product_is_left_to_how_a_device_multiplies_narrow_numbers():
    # The CPU's own multiplication of float16 would give the same; a new device's may round the factor first.
    with Products() as mode:
        non_finite_check_and_unscale_([torch.ones(2, dtype=dtype) for dtype in PATTERNS], torch.zeros(()), float32(0.3))
    assert mode.dtypes == [torch.float32] * 3 + [torch.float64]


def test_a_gradient_that_is_listed_twice_is_multiplied_twice_as_with_pytorch():
    for unscale in UNSCALES.values():
        gradient, found = torch.tensor([8.0, 3.0]), torch.zeros(())
        unscale([gradient, gradient, gradient[1:]], found, float32(0.5))
        assert gradient.tolist() == [2.0, 0.375]
        assert found == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", [0, 2**22 - 1, 2**22, 2**22 + 2])
def test_a_large_gradient_is_looked_at_everywhere(place, dtype):
    size = 2**22 + 3
    assert size > scaling_kernels._PIECE
    for bad in (1.0, INF):
        results = []
        for unscale in UNSCALES.values():
            gradient, found = torch.full((size,), 3.0, dtype=dtype), torch.zeros(())
            gradient[place] = bad
            unscale([gradient], found, float32(0.3))
            results.append((gradient, found.item()))
        assert torch.equal(results[0][0], results[1][0])
        assert results[0][1] == results[1][1] == (bad == INF)


factors = st.one_of(st.sampled_from([0.5, 0.9, 1.1, 2.0, 1.0, 1e300, INF, NAN, -1.0]), st.floats())
trackers = st.one_of(st.integers(-3, 8), st.sampled_from([2**31 - 2, 2**31 - 1, -(2**31)]))
intervals = st.one_of(st.integers(-1, 5), st.sampled_from([2000, 2**31 - 1, 2**31, -(2**31), 2**32 + 1, -(2**40)]))
flags = st.one_of(st.just(0.0), st.sampled_from([1.0, 2.0, -0.0, NAN, INF, -1.0, 1e-45]))


def run_updates(
    update: Callable[..., Tensor], start: tuple[float, int], rule: tuple[float, float, int], verdicts: list[float]
) -> list[tuple[Any, ...]]:
    scale, tracker = float32(start[0]), int32(start[1])
    history = []
    for verdict in verdicts:
        found = float32(verdict)
        assert update(scale, tracker, found, *rule) is scale
        history.append((*bits(scale), tracker.item(), *bits(found)))
    return history


@settings(max_examples=400, deadline=None)
@given(any_float32, trackers, factors, factors, intervals, st.lists(flags, min_size=1, max_size=12))
@example(1024.0, 0, 1.1, 0.9, 2, [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
@example(3e38, 0, 2.0, 0.5, 1, [0.0, 1.0, 0.0])
@example(1024.0, 7, 2.0, 0.5, 3, [0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
@example(1024.0, 0, 2.0, 0.5, 2**32 + 1, [0.0, 0.0])
@example(1e-39, 0, 2.0, 0.9, 2000, [1.0] * 8)
def test_scale_and_tracker_are_those_of_pytorchs_kernel(scale, tracker, growth, backoff, interval, verdicts):
    rule = (growth, backoff, interval)
    found = {name: run_updates(update, (scale, tracker), rule, verdicts) for name, update in UPDATES.items()}
    assert found["mezzo"] == found["pytorch"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensors_of_one_element_keep_their_shape(shape):
    for update in UPDATES.values():
        scale, tracker, found = torch.full(shape, 8.0), torch.zeros((1,), dtype=torch.int32), torch.zeros((1, 1))
        update(scale, tracker, found, 2.0, 0.5, 1)
        assert scale.tolist() == torch.full(shape, 16.0).tolist()
        assert tracker.tolist() == [0]


class WithoutFloat64(TorchDispatchMode):
    """A device that has no float64: whatever makes or takes one is refused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        involved = tree_leaves((args, kwargs))
        if torch.float64 in involved or any(getattr(one, "dtype", None) is torch.float64 for one in involved):
            msg = "no float64 here"
            raise TypeError(msg)
        return func(*args, **(kwargs or {}))


@contextmanager
def no_float64() -> Iterator[None]:
    known = scaling_kernels._with_float64.pop("cpu", None)
    try:
        with WithoutFloat64():
            yield
        assert "cpu" not in scaling_kernels._with_float64  # what a mode says of the device is not kept
    finally:
        if known is not None:
            scaling_kernels._with_float64["cpu"] = known


powers = st.integers(-30, 30).map(lambda power: 2.0**power)


@settings(max_examples=100, deadline=None)
@given(any_float32, powers, powers, st.integers(1, 3), st.lists(flags, min_size=1, max_size=6))
def test_without_float64_powers_of_two_give_the_same_to_the_last_bit(scale, growth, backoff, interval, verdicts):
    rule = (growth, backoff, interval)
    expected = run_updates(torch._amp_update_scale_, (scale, 0), rule, verdicts)
    with no_float64():
        assert run_updates(update_scale_, (scale, 0), rule, verdicts) == expected


def order(number: float) -> int:
    """Count float32 numbers upwards from 0: neighbours are one apart."""
    (pattern,) = struct.unpack("<i", struct.pack("<f", number))
    return pattern if pattern >= 0 else -(pattern + 2**31)


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-60, 2.0**60, width=32), st.floats(2.0**-40, 2.0**40), st.sampled_from([0.0, 1.0]))
@example(float32(1.5).item(), 0.9, 1.0)
def test_without_float64_other_factors_are_at_most_one_unit_in_the_last_place_off(scale, factor, verdict):
    results = []
    for update in UPDATES.values():
        after, tracker = float32(scale), int32(0)
        with no_float64() if update is update_scale_ else nullcontext():
            update(after, tracker, float32(verdict), factor, factor, 1)
        results.append(order(after.item()))
    assert abs(results[0] - results[1]) <= 1


def test_without_float64_some_products_do_differ_by_that_unit():
    scales = [float(scale) for scale in torch.linspace(1, 2, 500)]
    expected = [run_updates(torch._amp_update_scale_, (scale, 0), (1.1, 0.9, 1), [1.0]) for scale in scales]
    with no_float64():
        found = [run_updates(update_scale_, (scale, 0), (1.1, 0.9, 1), [1.0]) for scale in scales]
    assert found != expected


class NoHostRead(TorchDispatchMode):
    """Refuse whatever the host would have to wait for."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        assert not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags), func
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_on_the_host():
    scaled = [torch.tensor([1.0, bad], dtype=dtype) for dtype in PATTERNS for bad in (1.0, INF)]
    found, scale, tracker = torch.zeros(()), float32(8), int32(0)
    with NoHostRead() as mode:
        non_finite_check_and_unscale_(scaled, found, float32(0.5))
        update_scale_(scale, tracker, found, 2.0, 0.5, 2)
    assert mode.seen > 30
    assert (found.item(), scale.item()) == (1.0, 4.0)
    with pytest.raises(AssertionError), NoHostRead():  # it would notice
        found.item()


@pytest.mark.parametrize("dtype", PATTERNS, ids=str)
def test_on_tensors_without_values_both_kernels_run(dtype):
    # Fake tensors raise where the host asks for a number. On fake CUDA tensors no copy_ runs in a build without CUDA.
    scaled = [torch.empty(3, 4, dtype=dtype), torch.empty((), dtype=dtype)]
    with FakeTensorMode() as mode:
        scaled = [mode.from_tensor(each) for each in scaled]
        found, factor, scale = (torch.empty(()) for _ in range(3))
        tracker = torch.empty((), dtype=torch.int32)
        assert non_finite_check_and_unscale_(scaled, found, factor) is None
        assert update_scale_(scale, tracker, found, 1.1, 0.9, 2) is scale
        assert [each.dtype for each in (*scaled, scale, tracker)] == [dtype] * 2 + [torch.float32, torch.int32]
        with pytest.raises(DataDependentOutputException):  # it would notice
            found.item()


def test_no_policy_of_an_open_region_reaches_the_arithmetic():
    low = Policy("all low", dict.fromkeys(["mul", "sub", "sum", "where", "stack"], "lower_precision_fp"))
    with mezzo.torch.autocast("cpu", dtype=torch.bfloat16, policy=low):
        assert (torch.ones(1) * 1.1).dtype == torch.bfloat16
        largest = torch.finfo(torch.float32).max  # bfloat16 rounds it to Inf
        scaled, scale, found = torch.tensor([0.999, largest]), float32(1.001), torch.zeros(())
        non_finite_check_and_unscale_([scaled], found, float32(0.999))
        update_scale_(scale, int32(0), float32(1), 2.0, 0.9, 2)
    assert found == 0
    assert bits(scaled) == bits(torch.tensor([0.999, largest]) * float32(0.999))
    assert bits(scale) == bits(float32(float32(1.001).item() * 0.9))
