"""Cases that attacks on the engine have found: what a kept cast, a repair and a compiled region must not get wrong."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import active_policy, autocast, keep_casts, set_precision

LOW = torch.bfloat16
X = torch.ones(2, 4)


def region() -> autocast:
    return autocast("cpu", dtype=LOW)


def product(weight: Tensor) -> Tensor:
    with region():
        return nn.functional.linear(X[:, : weight.shape[1]], weight)


def right(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return nn.functional.linear(X[:, : weight.shape[1]].to(LOW), weight.to(LOW))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("block", [region, keep_casts])
@pytest.mark.parametrize("change", [lambda p: p[:2], lambda p: p.t()], ids=["fewer rows", "transposed"])
def test_data_that_becomes_a_view_of_itself_is_seen(frozen, block, change):
    weight = nn.Parameter(torch.arange(16.0).reshape(4, 4), requires_grad=not frozen)
    with block():
        product(weight)
        weight.data = change(weight.data)
        assert torch.equal(product(weight), right(weight))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("block", [region, keep_casts])
def test_data_that_gets_an_address_again_is_seen(frozen, block):
    weight = nn.Parameter(torch.rand(4, 4), requires_grad=not frozen)
    for _ in range(10):
        with block():
            for _ in range(3):
                product(weight)
                weight.data = weight.data * 1.5
                weight.data = weight.data - 0.5
                assert torch.equal(product(weight), right(weight))


def test_a_list_that_is_written_in_place_is_repaired_once():
    tensors = [torch.zeros(2), torch.zeros(2, dtype=LOW)]
    ends = [torch.ones(2), torch.ones(2)]
    with region():
        torch._foreach_lerp_(tensors, ends, 0.5)
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [0.5, 0.5]]


def test_a_weight_can_be_swapped_after_use():
    one, other = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.zeros(4, 4))
    product(one)
    torch.utils.swap_tensors(one, other)
    assert torch.equal(product(one), torch.zeros(2, 4, dtype=LOW))


def test_a_model_made_in_inference_mode_runs():
    with torch.inference_mode():
        linear = nn.Linear(4, 3)
    with torch.no_grad(), region():
        assert linear(X).dtype is LOW


def test_threads_with_regions_of_two_dtypes_share_a_weight():
    weight = nn.Parameter(torch.ones(4, 4))
    wrong: list[torch.dtype] = []

    def run(low: torch.dtype) -> None:
        for _ in range(300):
            with autocast("cpu", dtype=low):
                found = nn.functional.linear(X, weight).dtype
            if found is not low:
                wrong.append(found)

    threads = [threading.Thread(target=run, args=(low,)) for low in (torch.bfloat16, torch.float16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Interrupted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_an_interrupted_module_in_a_ruled_module_leaves_no_policy():
    net = nn.Sequential(Interrupted())
    set_precision(net, {"": "unified", "0": "fp32"})
    before = active_policy("cpu")
    with pytest.raises(KeyboardInterrupt), torch.autocast("cpu"):
        net(X)
    assert active_policy("cpu") == before


def test_a_function_decorated_inside_of_compiled_code_has_its_region():
    linear = nn.Linear(4, 4)

    def outer(x: Tensor) -> Tensor:
        @autocast("cpu", dtype=LOW)
        def inner(y: Tensor) -> Tensor:
            return linear(y)

        return inner(x)

    assert torch.compile(outer, backend="aot_eager", fullgraph=True)(X).dtype is LOW


@pytest.mark.parametrize("policy", ["unified", "default", "cuda"])
def test_an_index_may_be_left_out(policy: str):
    rows, low = torch.tensor([0, 2]), torch.ones(3, 2, dtype=LOW)
    with autocast("cpu", dtype=LOW, policy=policy):
        filled = torch.ops.aten.index_put(torch.zeros(3, 4), [None, rows], low)
    assert filled.dtype is torch.float32
    assert filled.sum(0).tolist() == [3, 0, 3, 0]
