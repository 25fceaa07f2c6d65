"""Compiled code computes as eager code does: regions around and inside of it, every policy, gradients too."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.torch import autocast, set_default_policy

NO_COMPILER = "needs a C++ compiler: Inductor compiles what it generates for the CPU"
CUSTOM = mezzo.builtin_policy("default").override({"linear": "fp32", "gelu": "lower_precision_fp"}, name="custom")
POLICIES = [None, "default", "torch", "unified", "fp32", CUSTOM]
BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor", marks=pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason=NO_COMPILER)
    ),
]
# Inductor fuses, and rounds to bfloat16 less often than eager code does; the others run the same kernels.
TOLERANCE = {"eager": 0.0, "aot_eager": 0.0, "inductor": 1e-2}

# Inductor uses what PyTorch's own notice advises against.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")

policies = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: getattr(policy, "name", str(policy)))
backends = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Softmax(-1))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def results(net: nn.Module, call: Callable[[], Tensor]) -> list[Tensor]:
    """Give the output of a call and the gradients of the weights, of a backward pass outside of any region."""
    net.zero_grad()
    out = call()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    out.backward(weights.to(out.dtype))
    return [out.detach(), *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)]


def assert_same(found: list[Tensor], wanted: list[Tensor], backend: str) -> None:
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in wanted]
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=TOLERANCE[backend], atol=TOLERANCE[backend])


@policies
@backends
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_a_region_around_a_compiled_function_means_what_it_means_in_eager(net, x, policy, backend, low) -> None:
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    region = autocast("cpu", dtype=low, policy=policy)

    def run(model: Callable[[Tensor], Tensor]) -> Tensor:
        with region:
            return model(x)

    assert_same(results(net, lambda: run(compiled)), results(net, lambda: run(net)), backend)


@policies
@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_a_region_inside_of_a_compiled_function_is_part_of_its_graph(net, x, policy, backend) -> None:
    def inside(x: Tensor) -> Tensor:
        with autocast("cpu", dtype=torch.bfloat16, policy=policy):
            return net(x)

    compiled = torch.compile(inside, backend=backend, fullgraph=True)
    assert_same(results(net, lambda: compiled(x)), results(net, lambda: inside(x)), backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("around", [None, "unified", "fp32"])
def test_nested_regions_inside_of_a_compiled_function_each_follow_their_policy(net, x, backend, around) -> None:
    def nested(x: Tensor) -> tuple[Tensor, ...]:
        with autocast("cpu", dtype=torch.bfloat16, policy="unified"):
            first = net(x)
            with autocast("cpu", enabled=False):
                second = net(x)
                with autocast("cpu", dtype=torch.float16):
                    third = net(x)
            with autocast("cpu", policy="torch"):
                fourth = net(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                fifth = net(x)
        return first, second, third, fourth, fifth, net(x)

    compiled = torch.compile(nested, backend=backend, fullgraph=True)
    with autocast("cpu", dtype=torch.bfloat16, policy=around, enabled=around is not None):
        assert_same(list(compiled(x)), list(nested(x)), backend)


def test_an_island_in_float32_has_the_gradients_of_eager_code(net, x) -> None:
    first = nn.Linear(8, 8)

    def island(x: Tensor) -> Tensor:
        hidden = first(x)
        with autocast("cpu", enabled=False):
            return net(hidden.float())

    compiled = torch.compile(island, backend="aot_eager", fullgraph=True)
    region = autocast("cpu", dtype=torch.bfloat16)

    def run(function: Callable[[Tensor], Tensor]) -> Tensor:
        with region:
            return function(x)

    both = nn.ModuleList([first, net])
    assert_same(results(both, lambda: run(compiled)), results(both, lambda: run(island)), "aot_eager")


def test_each_policy_has_compiled_code_of_its_own(net, x) -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for policy in ("default", "unified", "torch", CUSTOM, "default", "unified", None, CUSTOM):
        with autocast("cpu", dtype=torch.bfloat16, policy=policy):
            compiled(x)
    assert counter.frame_count == 4  # None is "default"


@pytest.mark.parametrize("inside", [False, True])
def test_a_default_policy_set_after_compiling_takes_effect(net, x, inside) -> None:
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(x)

    compiled = torch.compile(run if inside else net, backend="aot_eager", fullgraph=True)

    def dtype() -> torch.dtype:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
            return compiled(x).dtype

    before = dtype()
    set_default_policy("unified")
    after = dtype()
    set_default_policy(None)
    assert (before, after, dtype()) == (torch.bfloat16, torch.float32, torch.bfloat16)


def test_the_settings_of_the_compiler_are_the_users_before_and_after(net, x) -> None:
    import torch._functorch.config as functorch

    with torch.compiler.config.patch(cache_key_tag="mine"):
        with autocast("cpu", dtype=torch.bfloat16):
            torch.compile(net, backend="aot_eager", fullgraph=True)(x)
        assert torch.compiler.config.cache_key_tag == "mine"
    assert functorch.backward_pass_autocast == "same_as_forward"


def test_a_setting_of_the_users_for_the_backward_pass_is_kept(net, x) -> None:
    import torch._functorch.config as functorch

    seen = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        seen.append(functorch.backward_pass_autocast)
        return module.forward

    with autocast("cpu", dtype=torch.bfloat16):
        torch.compile(net, backend=backend)(x)
        torch.compiler.reset()
        with functorch.patch(backward_pass_autocast=[]):
            torch.compile(net, backend=backend)(x)
    assert seen == ["off", []]
