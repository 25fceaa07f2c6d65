"""The functional core: `LossScaling.next` on the device to the bit, PyTorch's quotients, and one compiled training step."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from mezzo import LossScaling, ScaleState, ScalingError, Verdict
from mezzo.torch.scaling.functional import next_scale, select_finite, unscale_gradients

from .clipped import HostReads

NO_COMPILER = "needs a C++ compiler: Inductor compiles what it generates for the CPU"
HAS_COMPILER = bool(shutil.which("g++") or shutil.which("clang++"))
BACKENDS = [
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(not HAS_COMPILER, reason=NO_COMPILER)),
]
# Inductor uses what PyTorch's own notice advises against.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")

FACTORS = [(2.0, 0.5), (1.7, 0.3), (1.0000001, 0.9999999), (1e30, 1e-30)]
NUMBERS = [
    LossScaling(growth_factor=growth, backoff_factor=backoff, growth_interval=3, min_scale=floor, max_scale=ceiling)
    for (growth, backoff), (floor, ceiling) in product(
        FACTORS, [(2.0**-24, None), (2.0**-126, None), (0.7, 123456.7), (1e3, 1e3)]
    )
]
SCALES = [2.0**16, 1.1, 0.1, 2.0**-24, 2.0**-126, 1.5 * 2.0**-126, 2.0**127, 3e38, 123456.7, 1e3]

backends = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def as_tensors(state: ScaleState) -> tuple[Tensor, Tensor]:
    return torch.tensor(state.scale), torch.tensor(state.growth_tracker, dtype=torch.int32)


def as_state(scale: Tensor, tracker: Tensor) -> ScaleState:
    assert scale.dtype == torch.float32
    assert tracker.dtype == torch.int32
    return ScaleState(scale.item(), int(tracker.item()))


# The scale


@pytest.mark.parametrize("numbers", NUMBERS, ids=range(len(NUMBERS)))
def test_the_next_scale_is_that_of_the_rule_to_the_bit(numbers):
    for scale, tracker, verdict in product(SCALES, [0, 1, 2, 3, 7], [Verdict.FINITE, Verdict.INF]):
        state = ScaleState(scale, tracker)
        found = torch.tensor(float(verdict is Verdict.INF))
        ours = as_state(*next_scale(*as_tensors(state), found, numbers))
        assert ours == numbers.next(state, verdict), (state, verdict)


@pytest.mark.parametrize("found", [1.0, 2.0, math.inf, math.nan])
def test_whatever_is_not_zero_is_an_overflow(found):
    scale, tracker = next_scale(torch.tensor(8.0), torch.tensor(5), torch.tensor(found), LossScaling())
    assert (scale.item(), tracker.item()) == (4.0, 0)
    assert tracker.dtype == torch.int64


def test_the_old_scale_and_tracker_are_not_written_into():
    scale, tracker = torch.tensor(8.0), torch.tensor(0)
    next_scale(scale, tracker, torch.tensor(1.0), LossScaling())
    next_scale(scale, tracker, torch.tensor(0.0), LossScaling(growth_interval=1))
    assert (scale.item(), tracker.item()) == (8.0, 0)


@backends
def test_a_compiled_rule_follows_a_long_run_to_the_bit(backend):
    numbers = LossScaling(growth_factor=1.7, backoff_factor=0.3, growth_interval=2, min_scale=0.01, max_scale=1e5)
    compiled = torch.compile(next_scale, backend=backend, fullgraph=True)
    chance = random.Random(0)
    state = numbers.start()
    tensors = as_tensors(state)
    for _ in range(200):
        verdict = chance.choice([Verdict.FINITE, Verdict.FINITE, Verdict.INF])
        state = numbers.next(state, verdict)
        tensors = compiled(*tensors, torch.tensor(float(verdict is Verdict.INF)), numbers)
        assert as_state(*tensors) == state


# Quotients


@pytest.mark.parametrize("scale", [2.0**16, 3.0, 0.7, 2.0**-20, 1e30])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_quotients_are_those_of_pytorchs_scaler_to_the_bit(dtype, scale):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in [(5, 7), (1000,), ()]]
    before = [gradient.clone() for gradient in gradients]
    theirs, found = [gradient.clone() for gradient in gradients], torch.zeros(())
    inverse = torch.tensor(scale).double().reciprocal().float()
    torch._amp_foreach_non_finite_check_and_unscale_(theirs, found, inverse)
    ours, found_inf = unscale_gradients(gradients, torch.tensor(scale))
    assert found_inf.dtype == torch.float32
    assert found_inf.shape == ()
    assert all(torch.equal(one, other) and one.dtype == dtype for one, other in zip(ours, theirs, strict=True))
    # With the small scale float16 overflows in the division, which PyTorch's kernel does not see.
    assert found_inf.item() == any(not each.isfinite().all() for each in theirs)
    assert all(torch.equal(one, other) for one, other in zip(gradients, before, strict=True))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64], ids=str)
def test_one_number_that_is_not_finite_is_found(dtype, bad):
    gradients = [torch.ones(3, dtype=dtype), torch.ones(2, 2, dtype=dtype)]
    assert unscale_gradients(gradients, torch.tensor(4.0))[1] == 0
    gradients[1][1, 0] = bad
    quotients, found_inf = unscale_gradients(gradients, torch.tensor(4.0))
    assert found_inf == 1
    assert quotients[0].tolist() == [0.25] * 3


def test_complex_numbers_are_divided():
    (quotient,), found_inf = unscale_gradients([torch.tensor([8.0 + 4.0j])], torch.tensor(8.0))
    assert quotient.tolist() == [1.0 + 0.5j]
    assert found_inf == 0


def test_no_gradients_are_finite():
    assert unscale_gradients([], torch.tensor(4.0)) == ([], torch.tensor(0.0))


# The choice


def test_the_choice_is_made_in_a_whole_nest():
    new = {"weights": [torch.ones(2), torch.full((), 3)], "name": "adam"}
    old = {"weights": [torch.zeros(2), torch.full((), 2)], "name": "adam"}
    for found, expected in ((0.0, new), (1.0, old), (math.nan, old)):
        chosen = select_finite(torch.tensor(found), new, old)
        assert torch.equal(chosen["weights"][0], expected["weights"][0])
        assert torch.equal(chosen["weights"][1], expected["weights"][1])
        assert chosen["name"] == "adam"


def test_a_nan_in_what_is_not_chosen_does_not_get_through():
    assert select_finite(torch.tensor(1.0), torch.tensor(math.nan), torch.tensor(2.0)) == 2.0


@pytest.mark.parametrize(
    ("new", "old", "text"),
    [
        ([torch.ones(1)], (torch.ones(1),), "two different nests"),
        ([torch.ones(1)], [torch.ones(1), torch.ones(1)], "two different nests"),
        (
            torch.ones(2),
            torch.ones(1),
            r"torch.float32 and shape \(2,\) for an old one of torch.float32 and shape \(1,\)",
        ),
        (torch.ones(1), torch.ones(1).half(), "make them alike"),
        (4, 3, r"got 4 for 3: only between tensors .* torch.tensor\(0\)"),
        (torch.ones(1), 3, "only between tensors can the device choose"),
    ],
)
def test_what_does_not_match_is_refused(new, old, text):
    with pytest.raises(ScalingError, match=text):
        select_finite(torch.tensor(0.0), new, old)


# All of it: a training step as one function, with Adam written out


def make_step(model: nn.Module, numbers: LossScaling, rate: float = 0.05):
    """Make a training step: state and batch in, state and found_inf out."""

    def scaled_loss(weights: dict[str, Tensor], scale: Tensor, x: Tensor, factor: Tensor) -> Tensor:
        return functional_call(model, weights, (x,)).square().mean() * factor * scale

    def step(state: dict, x: Tensor, factor: Tensor) -> tuple[dict, Tensor]:
        weights, moments, count = state["weights"], state["moments"], state["count"]
        scaled, _ = grad_and_value(scaled_loss)(weights, state["scale"], x, factor)
        gradients, found_inf = unscale_gradients(list(scaled.values()), state["scale"])
        new_count = count + 1
        new_weights, new_moments = {}, {}
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            first, second = moments[name]
            first, second = torch.lerp(first, gradient, 0.1), torch.lerp(second, gradient.square(), 0.001)
            change = first / (1 - 0.9**new_count) / ((second / (1 - 0.999**new_count)).sqrt() + 1e-8)
            new_weights[name], new_moments[name] = weight - rate * change, (first, second)
        new = {"weights": new_weights, "moments": new_moments, "count": new_count}
        old = {"weights": weights, "moments": moments, "count": count}
        scale, tracker = next_scale(state["scale"], state["tracker"], found_inf, numbers)
        return {**select_finite(found_inf, new, old), "scale": scale, "tracker": tracker}, found_inf

    return step


def trained_with_pytorch(model: nn.Module, batches: list, numbers: LossScaling) -> tuple[list[float], list[Tensor]]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, foreach=False)
    scaler = torch.amp.GradScaler(
        "cpu", numbers.init_scale, numbers.growth_factor, numbers.backoff_factor, numbers.growth_interval
    )
    scales = []
    for x, factor in batches:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_a_compiled_training_step_trains_as_pytorchs_scaler_and_adam_do(backend):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    numbers = LossScaling(init_scale=2.0**10, growth_interval=4)
    factors = [math.inf, 1.0, 1.0, 1.0, 1.0, math.nan, math.inf, *[1.0] * 9]
    batches = [(torch.randn(3, 4), torch.tensor(factor)) for factor in factors]
    state = {
        "weights": weights,
        "moments": {name: (torch.zeros_like(each), torch.zeros_like(each)) for name, each in weights.items()},
        "count": torch.tensor(0),
        "scale": torch.tensor(numbers.init_scale),
        "tracker": torch.tensor(0),
    }
    step = make_step(model, numbers)
    if backend is not None:
        step = torch.compile(step, backend=backend, fullgraph=True)
    scales, found = [], []
    for x, factor in batches:
        # In a full graph there are none. A dispatch mode keeps compiled code from running.
        with HostReads() if backend is None else nullcontext() as reads:
            state, found_inf = step(state, x, factor)
        assert reads is None or reads.count == 0
        scales.append(state["scale"].item())
        found.append(found_inf.item())
    assert found == [float(not math.isfinite(factor)) for factor in factors]
    assert state["count"] == len(factors) - sum(found)
    their_scales, their_weights = trained_with_pytorch(model, batches, numbers)
    assert scales == their_scales
    # Adam divides by the root of what may be small: rounding differs in the order of its operations.
    torch.testing.assert_close(list(state["weights"].values()), their_weights, rtol=1e-4, atol=1e-5)
