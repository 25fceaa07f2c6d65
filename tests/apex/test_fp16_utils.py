"""Models cast to float16, and masters kept, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.apex import fp16_utils
from mezzo.errors import AmpError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.plain = nn.BatchNorm1d(4, affine=False)
        self.lstm = nn.LSTM(4, 2, batch_first=True)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.plain(self.norm(self.linear(x)))
        return hidden * self.scale


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in model.state_dict().items() if "num_batches" not in name}


@pytest.mark.parametrize("how", ["convert_network", "network_to_half", "BN_convert_float", "FP16Model"])
def test_conversions_leave_batch_norms_with_weights_alone(how: str) -> None:
    model = Net()
    if how == "convert_network":
        assert fp16_utils.convert_network(model, torch.float16) is model
    elif how == "BN_convert_float":
        assert fp16_utils.BN_convert_float(model.half()) is model
    else:
        wrapped = getattr(fp16_utils, how)(model)
        assert wrapped(torch.randn(5, 3)).dtype is torch.float16
    found = dtypes(model)
    kept = {name for name, dtype in found.items() if dtype is torch.float32}
    assert kept == {f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")}
    assert found.pop("count") is torch.int64
    assert {dtype for name, dtype in found.items() if name not in kept} == {torch.float16}


def test_a_converted_module_keeps_its_parameters_and_their_gradients() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    inner = model[0]
    before = list(inner.parameters())
    inner.weight.grad = torch.ones(2, 2)
    fp16_utils.convert_module(model, torch.float16)
    assert inner.weight.dtype is torch.float32  # not those of the modules inside
    fp16_utils.convert_module(inner, torch.float16)
    assert all(one is other for one, other in zip(before, inner.parameters(), strict=True))
    assert inner.weight.grad is not None
    assert inner.weight.dtype is inner.weight.grad.dtype is torch.float16


@pytest.mark.parametrize("flat", [False, True])
def test_training_with_masters_by_hand_is_training_in_float32(flat: bool) -> None:
    """With small integers, which float16 has exactly, the masters are the float32 model's parameters bit for bit."""
    low, wide = nn.Linear(2, 2), nn.Linear(2, 2)
    for one in (*low.parameters(), *wide.parameters()):
        nn.init.constant_(one, 0.5)
    low.half()
    model_params, master_params = fp16_utils.prep_param_lists(low, flat_master=flat)
    assert all(one.dtype is torch.float32 and one.is_leaf and one.requires_grad for one in master_params)
    steps = torch.optim.SGD(master_params, lr=0.25), torch.optim.SGD(wide.parameters(), lr=0.25)
    x = torch.tensor([[1.0, 2.0], [-1.0, 4.0]])
    for _ in range(2):
        for model in (low, wide):
            model.zero_grad()
            model(x.to(model.weight.dtype)).sum().backward()
        fp16_utils.model_grads_to_master_grads(model_params, master_params, flat_master=flat)
        for one in steps:
            one.step()
        fp16_utils.master_params_to_model_params(model_params, master_params, flat_master=flat)
    expected = [one.detach() for one in wide.parameters()]
    assert torch.equal(
        torch.cat([one.flatten() for one in master_params]), torch.cat([one.flatten() for one in expected])
    )
    assert all(torch.equal(one, other.half()) for one, other in zip(low.parameters(), expected, strict=True))


def test_masters_are_of_the_parameters_that_are_trained() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    model_params, master_params = fp16_utils.prep_param_lists(model)
    assert [id(one) for one in model_params] == [id(model.weight)]
    master_params[0].data.zero_()
    assert model.weight.any()  # a copy, of a float32 parameter too
    fp16_utils.model_grads_to_master_grads(model_params, master_params)
    assert master_params[0].grad is None


def test_one_master_of_several_dtypes_or_without_gradients_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    fp16_utils.convert_network(model, torch.float16)
    with pytest.raises(AmpError, match=r"these are torch.float16, torch.float32. Use flat_master=False."):
        fp16_utils.prep_param_lists(model, flat_master=True)
    params, masters = fp16_utils.prep_param_lists(nn.Linear(2, 2), flat_master=True)
    with pytest.raises(AmpError, match="takes the gradients of all 2 parameters, and 0 have one"):
        fp16_utils.model_grads_to_master_grads(params, masters, flat_master=True)


@pytest.mark.parametrize("value", [torch.tensor(2.5), torch.tensor([2.5]), [2.5]], ids=str)
def test_a_number_is_taken_out_of_a_tensor(value: Any) -> None:
    assert fp16_utils.to_python_float(value) == 2.5


def test_clip_grad_norm_is_pytorchs() -> None:
    assert fp16_utils.clip_grad_norm is nn.utils.clip_grad_norm_


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FP16_Optimizer", "mezzo has no FP16_Optimizer, .*opt_level='O2'.*with amp.scale_loss"),
        ("LossScaler", "mezzo has no LossScaler, .*loss_scale=128.0"),
        ("DynamicLossScaler", "mezzo has no DynamicLossScaler, .*loss_scale='dynamic'"),
    ],
)
def test_classes_from_before_amp_say_what_to_use(name: str, message: str) -> None:
    with pytest.raises(AmpError, match=message):
        getattr(fp16_utils, name)(torch.optim.SGD([nn.Parameter(torch.ones(1))]), dynamic_loss_scale=True)
