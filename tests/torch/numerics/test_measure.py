"""`measure` counts what real casts would do, exactly."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.report.numbers import Loss, Numbers
from mezzo.torch import autocast
from mezzo.torch.recording.numerics import measure, measure_all

TARGETS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


def edges() -> Tensor:
    """Give the thresholds of both 16-bit dtypes in float32, and their neighbours to both sides, of both signs."""
    found = []
    for dtype in TARGETS.values():
        info = torch.finfo(dtype)
        least = info.smallest_normal * info.eps
        # Where rounding goes over to Inf, to 0, and from the subnormal numbers to the normal ones.
        found += [info.max * (1 + info.eps / 4), least / 2, info.smallest_normal - least / 2]
        found += [info.max, least, info.smallest_normal]
    exact = torch.tensor(found, dtype=torch.float64).float()
    both = [torch.nextafter(exact, torch.tensor(end)) for end in (0.0, math.inf)]
    return torch.cat([exact, *both, -exact])


def expected(numbers: Tensor) -> Numbers:
    """Count the slow way: every number in float64, every loss by a cast."""
    wide = numbers.double().abs().reshape(-1)
    finite = wide[wide.isfinite()]
    nonzero = finite[finite != 0].tolist()
    exponents: dict[int, int] = {}
    for number in nonzero:
        exponent = math.frexp(number)[1] - 1
        exponents[exponent] = exponents.get(exponent, 0) + 1
    losses = {}
    for name, dtype in TARGETS.items():
        low = numbers.to(dtype).double().abs().reshape(-1)
        counts = (
            (low.isinf() & wide.isfinite()).sum(),
            ((low == 0) & (wide != 0)).sum(),
            ((low > 0) & (low < torch.finfo(dtype).smallest_normal)).sum(),
        )
        losses[name] = Loss(*(int(count) / wide.numel() for count in counts))
    return Numbers(
        elements=wide.numel(),
        max_abs=max(nonzero, default=0.0),
        min_abs=min(nonzero, default=0.0),
        nan=int(wide.isnan().sum()),
        inf=int(wide.isinf().sum()),
        losses=losses,
        exponents=exponents,
    )


KINDS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: torch.randn(1001),
    "every size": lambda: torch.randn(3000) * torch.exp2(torch.randint(-149, 128, (3000,)).float()),
    "thresholds": edges,
    "zeros only": lambda: torch.zeros(9),
    "nothing finite": lambda: torch.tensor([math.inf, -math.inf, math.nan]),
    "half zeros": lambda: torch.randn(500).relu(),
    "smallest of float32": lambda: torch.tensor([2.0**-149, -(2.0**-140), 0.0, -0.0]),
    "smallest with inf": lambda: torch.tensor([2.0**-149, math.inf, 3.0, math.nan, 5.0, 5.01]),
    "one number": lambda: torch.full((333,), 65519.0),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, *FLOAT8], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_counts_are_those_of_real_casts(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    numbers = KINDS[kind]().to(dtype)
    assert measure(numbers) == expected(numbers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_number_there_is_of_16_bits_is_counted_right(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert measure(numbers) == expected(numbers)


def test_numbers_of_float64_outside_of_float32_are_lost() -> None:
    numbers = torch.tensor([1e300, 1e-300, 5e-324, 1.0, 65519.9999999], dtype=torch.float64)
    got = measure(numbers)
    assert got == expected(numbers)
    assert got is not None
    assert got.losses["bfloat16"] == Loss(overflow=0.2, underflow=0.4)


def test_thresholds_are_those_of_rounding() -> None:
    got = measure(torch.tensor([65519.99, 65520.0, 2.0**-25, 2.0**-24]))
    assert got is not None
    assert got.losses["float16"] == Loss(overflow=0.25, underflow=0.25, subnormal=0.25)


@pytest.mark.parametrize(
    "window",
    [
        lambda x: x.t(),
        lambda x: x[::2, 3:],
        lambda x: x[0, 0],
        lambda x: x[:, None].expand(-1, 5, -1),
        lambda x: x.sum().expand(7, 9),
        lambda x: x[:0],
        lambda x: x[:0, None].expand(-1, 5, -1),
    ],
    ids=["transposed", "strided", "one", "expanded", "scalar expanded", "empty", "empty expanded"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_views_are_counted_as_their_copies(window: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    view = window((torch.randn(6, 8) * 1e-5).to(dtype))
    assert measure(view) == measure(view.clone(memory_format=torch.contiguous_format))
    found = measure(view)
    assert found is not None
    assert found.elements == view.numel() == found.zeros + sum(found.exponents.values())


def test_an_empty_tensor_has_no_losses() -> None:
    assert measure(torch.empty(0)) == Numbers(0, 0.0, 0.0, losses={name: Loss() for name in TARGETS})


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("change", [lambda x: x, torch.conj, lambda x: x.conj().imag], ids=["as is", "conj", "negated"])
def test_complex_numbers_are_counted_by_their_parts(change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    numbers = change(torch.randn(50, dtype=dtype) * 1e-6)
    parts = torch.view_as_real(numbers.resolve_conj()) if numbers.is_complex() else numbers.resolve_neg()
    assert measure(numbers) == expected(parts.clone())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(3),
        lambda: torch.ones(2, 2).to_sparse(),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        lambda: FakeTensorMode().from_tensor(torch.ones(2)),
    ],
    ids=["integers", "sparse", "meta", "nested", "quantized", "fake"],
)
@pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning", "ignore:.*quantize:UserWarning")
def test_what_has_no_numbers_to_read_is_not_measured(make: Callable[[], Tensor]) -> None:
    assert measure(make()) is None


def test_nobody_sees_the_measuring() -> None:
    seen: list[object] = []

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    weight = nn.Parameter(torch.tensor([1e-7, 3.0, math.inf]))
    state = torch.get_rng_state()
    version = weight._version
    with Ops(), Functions(), autocast("cpu", dtype=torch.bfloat16):
        seen.clear()
        assert measure(weight) is not None
    # Reading a tensor's attributes is a function to a function mode; none of them is an op.
    assert [one for one in seen if isinstance(one, torch._ops.OpOverload)] == []
    assert weight._version == version
    assert weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_the_error_is_written_down_with_the_numbers() -> None:
    got = measure(torch.ones(2), 0.25)
    assert got is not None
    assert got.error == 0.25


def test_results_are_measured_together() -> None:
    first, second, places = torch.tensor([1.0, 70000.0]), torch.zeros(2, dtype=torch.bfloat16), torch.arange(2)
    got = measure_all([first, places, second], [0.1, None, 0.5])
    assert got is not None
    assert (got.elements, got.max_abs, got.error) == (4, 70000.0, 0.5)
    assert got.losses["float16"].overflow == 0.25
    assert measure_all([places]) is None
    assert measure_all([]) is None


def test_a_wrong_number_of_errors_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got 2 tensors and 1 errors; pass one for each tensor, or none"):
        measure_all([torch.ones(1), torch.ones(1)], [0.5])


def test_numbers_hold_no_tensor_and_travel_between_processes() -> None:
    found = measure(torch.randn(4))
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_tensor_of_any_stride_has_no_numbers(shape: tuple[int, ...]) -> None:
    numbers = measure(torch.randn((*shape[:-1], 1)).expand(shape))
    assert numbers is not None
    assert numbers.elements == 0
