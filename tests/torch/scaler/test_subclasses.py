"""Subclasses written for PyTorch's class override its private methods; under mezzo's these are called just so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .runs import CLASSES, INF, each_loop
from .test_protocol import Bench

each_base = pytest.mark.parametrize("base", CLASSES.values(), ids=CLASSES.keys())


def overflowed_elsewhere(base: type) -> type:
    """Make a scaler of a model-parallel trainer: before the decision, an Inf that another rank found comes in."""

    class Parallel(base):
        elsewhere = 0.0

        def _maybe_opt_step(self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            for found in optimizer_state["found_inf_per_device"].values():
                found.add_(self.elsewhere)
            if any(found.item() for found in optimizer_state["found_inf_per_device"].values()):
                return None
            return optimizer.step(*args, **kwargs)

    return Parallel


@each_base
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
def test_an_inf_of_another_rank_skips_and_backs_off(base: type, unscale: bool) -> None:
    one = Bench(overflowed_elsewhere(base)("cpu", init_scale=1024.0))
    weights, scales = [], []
    for elsewhere, factor in ((0.0, 1.0), (1.0, 1.0), (0.0, 1.0), (0.0, INF), (1.0, INF), (0.0, 1.0)):
        one.scaler.elsewhere = elsewhere
        one.backward(factor)
        if unscale:
            one.scaler.unscale_(one.optimizer)
        one.scaler.step(one.optimizer)
        one.scaler.update()
        weights.append(one.weight[0].item())
        scales.append(one.scaler.get_scale())
    assert weights == [-1.0, -1.0, -2.0, -2.0, -2.0, -3.0]
    assert scales == [1024.0, 512.0, 512.0, 256.0, 128.0, 128.0]


@each_base
def test_a_super_call_decides_on_what_the_subclass_wrote(base: type) -> None:
    class Parallel(base):
        def _maybe_opt_step(self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            for found in optimizer_state["found_inf_per_device"].values():
                found.fill_(1.0)
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    one = Bench(Parallel("cpu", init_scale=1024.0))
    assert one.iterate() == 0.0
    assert one.scaler.get_scale() == 512.0


@each_base
def test_an_unscaling_of_the_subclass_is_the_one_that_is_done(base: type) -> None:
    class Own(base):
        calls: list[tuple[float, float]] = []

        def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
            self.calls.append((inv_scale.item(), found_inf.item()))
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found_inf += (~parameter.grad.isfinite()).any()
                    parameter.grad.mul_(inv_scale)
            return {found_inf.device: found_inf}

    one = Bench(Own("cpu", init_scale=1024.0))
    assert [one.iterate(factor) for factor in (3.0, INF, 1.0)] == [-3.0, -3.0, -4.0]
    assert one.scaler.get_scale() == 512.0
    assert Own.calls == [(1 / 1024, 0.0), (1 / 1024, 0.0), (1 / 512, 0.0)]


@each_base
def test_an_unscaling_that_adds_to_the_one_of_the_base(base: type) -> None:
    class Reduced(base):
        def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
            for value in found.values():
                value.fill_(1.0)
            return found

    one = Bench(Reduced("cpu", init_scale=1024.0))
    assert one.iterate() == 0.0
    assert one.scaler.get_scale() == 512.0
    assert one.weight.grad.tolist() == [1.0, 1.0]


@each_base
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_well_known_way_to_allow_float16_gradients_works(base: type, dtype: torch.dtype) -> None:
    class Allowing(base):
        def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    one = Bench(Allowing("cpu", init_scale=1024.0))
    one.weight.data = one.weight.data.to(dtype)
    assert [one.iterate(factor) for factor in (3.0, INF, 1.0)] == [-3.0, -3.0, -4.0]
    assert one.scaler.get_scale() == 512.0


@each_base
def test_step_calls_the_public_unscale_of_the_subclass(base: type) -> None:
    class Counting(base):
        count = 0

        def unscale_(self, optimizer: Any) -> None:
            self.count += 1
            super().unscale_(optimizer)

    one = Bench(Counting("cpu"))
    one.iterate()
    assert (one.scaler.count, one.weight[0].item()) == (1, -1.0)


@each_base
@each_loop
def test_a_scale_that_the_subclass_serves_itself(base: type, loop: str) -> None:
    class Own(base):
        def _get_scale_async(self) -> Tensor | None:
            return self._scale

        def get_scale(self) -> float:
            return super().get_scale() * 1.0

    one = Bench(Own("cpu", init_scale=16.0), loop)
    assert [one.iterate(factor) for factor in (2.0, INF)] == [-2.0, -2.0]
    assert one.scaler.get_scale() == 8.0


@each_base
def test_an_update_of_the_subclass_can_read_what_was_found(base: type) -> None:
    class Listing(base):
        found: list[float] = []

        def update(self, new_scale: Any = None) -> None:
            states = self._per_optimizer_states.values()
            self.found.extend(value.item() for state in states for value in state["found_inf_per_device"].values())
            super().update(new_scale)
            assert not self._per_optimizer_states

    one = Bench(Listing("cpu"))
    for factor in (1.0, INF):
        one.iterate(factor)
    assert Listing.found == [0.0, 1.0]
