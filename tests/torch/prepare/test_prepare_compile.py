"""Prepared models in compiled code: they train as in eager code, and are compiled once."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo.torch
from mezzo.torch import GradScaler, autocast, master_params, prepare

STEPS = 5
BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(
            not (shutil.which("g++") or shutil.which("clang++")),
            reason="needs a C++ compiler: Inductor compiles what it generates for the CPU",
        ),
    ),
]

# Inductor uses what PyTorch's own notice advises against.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")

backends = pytest.mark.parametrize("backend", BACKENDS)
Step = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def build() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(step: int) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(step))


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def around(model: Callable[[Tensor], Tensor]) -> Step:
    """A region around the call."""

    def forward(data: Tensor) -> Tensor:
        with autocast("cpu", dtype=torch.bfloat16):
            return model(data).float().square().mean()

    return forward


def train(
    forward: Step, optimizer: torch.optim.Optimizer, *, micro: int = 1, step: Callable[[], Any] | None = None
) -> dict[str, Any]:
    losses, dtypes = [], set()
    for number in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro):
            loss = forward(batch(number + 50 * part))
            loss.backward()
            losses.append(loss.item())
            dtypes.add((part, *{str(one.grad.dtype) for one in low_params(optimizer) if one.grad is not None}))
        (step or optimizer.step)()
    masters = [one.detach().clone() for one in master_params(optimizer)]
    weights = [one.detach().clone() for one in low_params(optimizer)]
    return {"losses": losses, "dtypes": dtypes, "masters": masters, "weights": weights}


def low_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    held = [one for group in optimizer.param_groups for one in group["params"]]
    return [one.model_param for one in held if hasattr(one, "model_param")]


def eager(micro: int = 1, **options: Any) -> dict[str, Any]:
    model = build()
    optimizer = adamw(model)
    prepare(model, optimizer, **options)
    return train(around(model), optimizer, micro=micro)


def assert_same(found: dict[str, Any], wanted: dict[str, Any], backend: str = "aot_eager") -> None:
    """Bit for bit with the same kernels; Inductor fuses, and rounds to bfloat16 less often, by 2^-8 each time."""
    assert found["dtypes"] == wanted["dtypes"]
    assert found["losses"][-1] < found["losses"][0]
    if backend == "aot_eager":
        assert found["losses"] == wanted["losses"]
    else:
        torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(wanted["losses"]), rtol=0.05, atol=0.0)
    # A gradient around 0 may have the other sign, and Adam's first steps are as long as the learning rate, 0.01.
    tolerance = 0.0 if backend == "aot_eager" else 2 * STEPS * 0.01
    for key in ("masters", "weights"):
        for one, other in zip(found[key], wanted[key], strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance)


@backends
@pytest.mark.parametrize("before", [True, False], ids=["compiled first", "prepared first"])
@pytest.mark.parametrize("inside", [True, False], ids=["region inside", "region around"])
def test_compiled_training_is_that_of_eager_code(backend: str, before: bool, inside: bool) -> None:
    model = build()
    optimizer = adamw(model)

    def compiled() -> Step:
        if inside:
            return torch.compile(around(model), backend=backend, fullgraph=True)
        return around(torch.compile(model, backend=backend, fullgraph=True))

    forward = compiled() if before else None
    prepare(model, optimizer)
    assert_same(train(forward or compiled(), optimizer), eager(), backend)


def test_code_that_was_run_before_prepare_is_compiled_anew() -> None:
    model = build()
    optimizer = adamw(model)
    forward = around(torch.compile(model, backend="aot_eager", fullgraph=True))
    forward(batch(0)).backward()
    optimizer.zero_grad()
    prepare(model, optimizer)
    assert_same(train(forward, optimizer), eager())


@pytest.mark.parametrize("grad_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inside", [True, False], ids=["region inside", "region around"])
def test_gradients_that_are_added_up_are_float32_as_in_eager_code(inside: bool, grad_dtype: torch.dtype | None) -> None:
    model = build()
    optimizer = adamw(model)
    prepare(model, optimizer, grad_dtype=grad_dtype)
    if inside:
        forward = torch.compile(around(model), backend="aot_eager", fullgraph=True)
    else:
        forward = around(torch.compile(model, backend="aot_eager", fullgraph=True))
    found = train(forward, optimizer, micro=3)
    assert_same(found, eager(micro=3, grad_dtype=grad_dtype))
    first = "torch.float32" if grad_dtype is torch.float32 else "torch.bfloat16"
    then = "torch.bfloat16" if grad_dtype is torch.bfloat16 else "torch.float32"
    assert found["dtypes"] == {(0, first), (1, then), (2, then)}


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("masters", [True, "kahan", False])
@pytest.mark.parametrize("inside", [True, False], ids=["region inside", "region around"])
def test_nothing_is_compiled_again_from_step_to_step(inside: bool, masters: Any, micro: int) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    model = build()
    optimizer = adamw(model)
    prepare(model, optimizer, masters=masters, rounding="nearest" if masters else "stochastic")
    if inside:
        forward = torch.compile(around(model), backend=counter, fullgraph=True)
    else:
        forward = around(torch.compile(model, backend=counter, fullgraph=True))
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(forward, optimizer, micro=micro)
    assert counter.frame_count == 1


def test_one_graph_has_no_casts_of_weights() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        from functorch.compile import make_boxed_func
        from torch._functorch.aot_autograd import aot_module_simplified

        def keep(inner: torch.fx.GraphModule, _: object) -> Any:
            graphs.append(inner)
            return make_boxed_func(inner.forward)

        return aot_module_simplified(module, inputs, fw_compiler=keep)

    def casts(*, ready: bool) -> int:
        torch.compiler.reset()
        graphs.clear()
        model = build()
        if ready:
            prepare(model)
        with torch.no_grad():
            around(torch.compile(model, backend=backend, fullgraph=True))(batch(0))
        return sum("_to_copy" in str(node.target) for graph in graphs for node in graph.graph.nodes)

    assert casts(ready=False) - casts(ready=True) == 6  # the weights and biases of three layers


def test_a_model_wrapped_by_the_compiler_is_prepared_in_place() -> None:
    model = build()
    wrapped: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = adamw(wrapped)
    found, same = prepare(wrapped, optimizer)
    assert found is wrapped
    assert same is optimizer
    assert model[0].weight.dtype is torch.bfloat16
    assert_same(train(around(wrapped), optimizer), eager())
    mezzo.torch.unprepare(wrapped, optimizer)
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    around(wrapped)(batch(0)).backward()
    optimizer.step()


def test_a_module_compiled_in_place_is_prepared() -> None:
    model = build()
    model.compile(backend="aot_eager", fullgraph=True)
    optimizer = adamw(model)
    prepare(model, optimizer)
    assert_same(train(around(model), optimizer), eager())


@pytest.mark.parametrize("options", [{}, {"masters": "kahan"}, {"masters": False, "rounding": "stochastic"}], ids=str)
def test_a_compiled_step_has_the_results_of_an_eager_one(options: dict[str, Any]) -> None:
    model = build()
    optimizer = adamw(model)
    prepare(model, optimizer, **options)

    def step() -> None:
        optimizer.step()

    compiled = torch.compile(step, backend="aot_eager")
    assert_same(train(around(model), optimizer, step=compiled), eager(**options))


@pytest.mark.parametrize("fused", [False, True])
def test_another_optimizer_of_the_class_is_compiled_after_a_prepared_one(fused: bool) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model, other = build(), build()
    optimizer, plain = adamw(model), adamw(other, fused=fused)
    prepare(model, optimizer)
    around(model)(batch(0)).backward()
    torch.compile(optimizer.step, backend="aot_eager")()
    counter = CompileCounterWithBackend("aot_eager")
    around(other)(batch(0)).backward()
    before = other[0].weight.detach().clone()
    torch.compile(plain.step, backend=counter)()
    assert counter.frame_count == (0 if fused else 1)
    assert not torch.equal(other[0].weight, before)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at the loss
def test_a_compiled_training_step_has_the_results_of_an_eager_one() -> None:
    model = build()
    optimizer = adamw(model)
    prepare(model, optimizer)

    def whole(data: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = around(model)(data)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = torch.compile(whole, backend="aot_eager")
    losses = [step(batch(number)).item() for number in range(STEPS)]
    wanted = eager()
    assert losses == wanted["losses"]
    for one, other in zip(master_params(optimizer), wanted["masters"], strict=True):
        assert torch.equal(one, other)


def test_checkpointed_code_is_compiled() -> None:
    from torch.utils.checkpoint import checkpoint

    model = build()
    optimizer = adamw(model)
    prepare(model, optimizer)
    compiled = torch.compile(
        lambda data: checkpoint(model, data, use_reentrant=False), backend="aot_eager", fullgraph=True
    )
    assert_same(train(around(compiled), optimizer), eager())


def test_a_scaler_skips_as_in_eager_code() -> None:
    found = []
    for compile_it in (False, True):
        torch.compiler.reset()
        model: Any = build()
        optimizer = adamw(model)
        prepare(model, optimizer, dtype=torch.float16)
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if compile_it else model
        scaler = GradScaler("cpu", init_scale=2.0**10)
        seen = []
        for number in range(STEPS):
            optimizer.zero_grad()
            with autocast("cpu", dtype=torch.float16):
                loss = called(batch(number)).float().square().mean()
            scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append((loss.item(), scaler.get_scale()))
        found.append((seen, [one.detach().tolist() for one in master_params(optimizer)]))
    assert found[0] == found[1]
    assert [scale for _, scale in found[0][0]] == [2.0**10] * 2 + [2.0**9] * 3


def test_a_copy_of_a_compiled_model_and_its_optimizer_trains_as_the_original() -> None:
    model = build()
    wrapped: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = adamw(wrapped)
    prepare(wrapped, optimizer)
    loss = train(around(wrapped), optimizer)["losses"][-1]
    other, its = copy.deepcopy((wrapped, optimizer))
    assert other._orig_mod[0].weight is not model[0].weight
    found, wanted = train(around(other), its), train(around(wrapped), optimizer)
    assert found["losses"] == wanted["losses"]
    assert found["losses"][-1] < loss
    for one, same in zip(found["masters"], wanted["masters"], strict=True):
        assert torch.equal(one, same)
