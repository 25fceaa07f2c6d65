"""Regions as objects: copied, pickled, shown, refused half-way; and what PyTorch's own cache holds while they are open."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import mezzo.torch

LOW = (torch.bfloat16, torch.float16)
low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)


@pytest.fixture(params=[torch.autocast, mezzo.torch.autocast], ids=["torch", "mezzo"])
def autocast(request: pytest.FixtureRequest) -> Any:
    return request.param


def product_dtype() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


class Model(torch.nn.Module):
    """A model that keeps its region, as some do."""

    def __init__(self, region: Any) -> None:
        super().__init__()
        self.region = region

    def forward(self) -> torch.dtype:
        with self.region:
            return product_dtype()


@low_dtypes
@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "deepcopy", "pickle"]
)
def test_a_model_that_keeps_a_region_can_be_copied_and_pickled(autocast, again, low):
    model = Model(autocast("cpu", dtype=low))
    assert again(model)() == low
    assert model() == low


@low_dtypes
def test_a_copied_region_keeps_its_policy_and_not_what_the_original_has_open(low):
    region = mezzo.torch.autocast("cpu", dtype=low, policy="fp32")
    with region:
        copied = copy.deepcopy(region)
    with copied:
        assert product_dtype() == torch.float32
        assert mezzo.torch.active_policy("cpu").name == "fp32"
    assert mezzo.torch.active_policy("cpu").name == "torch"


def state_after_a_failed_entry() -> tuple[Any, ...]:
    with mezzo.torch.autocast("cpu", dtype=torch.float16):
        with pytest.warns(UserWarning, match="Disabling autocast"):
            region = mezzo.torch.autocast("cpu", dtype="bf16", policy="fp32")
        with pytest.raises(TypeError, match=r"must be torch\.dtype, not str"), region:
            pass
        policy = mezzo.torch.active_policy("cpu").name
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), product_dtype(), policy


def test_a_region_that_cannot_be_entered_leaves_the_state_as_it_was():
    # In a thread of its own, so that what might be left does not reach other tests.
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(state_after_a_failed_entry).result(timeout=30)
    assert found == (True, torch.float16, torch.float16, "default")


def test_a_region_shows_what_it_is():
    region = mezzo.torch.autocast("cpu", dtype=torch.float16, enabled=False, policy="fp32")
    assert repr(region) == "autocast('cpu', dtype=torch.float16, enabled=False, policy='fp32')"
    assert repr(mezzo.torch.autocast("cpu")) == "autocast('cpu', dtype=torch.bfloat16, enabled=True)"


@low_dtypes
def test_pytorchs_own_cache_lives_from_the_outermost_entry_to_the_outermost_exit(autocast, low):
    weight = torch.nn.Parameter(torch.ones(2, 2))

    def cast_node() -> Any:
        node = torch.mm(weight, torch.ones(2, 2)).grad_fn.next_functions[0][0]
        assert node.name() == "ToCopyBackward0"
        return node

    with autocast("cpu", dtype=low):
        first = cast_node()
        with autocast("cpu", dtype=low):
            assert cast_node() is first
        with autocast("cpu", dtype=low, cache_enabled=False):
            assert cast_node() is not first
        assert cast_node() is first
    with torch.no_grad():
        weight.mul_(2)
    with autocast("cpu", dtype=low):
        assert torch.mm(weight, torch.ones(2, 2))[0, 0].item() == 4
