"""The parts of Apex besides amp, in numbers: optimizers, norms and kernels."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.apex import normalization, optimizers
from mezzo.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from mezzo.errors import AmpError
from mezzo.torch import prepare

Make = Callable[[Any], torch.optim.Optimizer]
WEIGHT = [1.0, -2.0, 0.5] * 16  # as many as the vectorized parts of kernels take
GRADIENTS = [[0.5, -2.0, 1e-3] * 16, [0.25, 1.0, 0.0] * 16, [-1.0, 3.0, 2e-3] * 16]


def stepped(make: Make, steps: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    """Give a parameter after steps with given gradients."""
    weight = nn.Parameter(torch.tensor(WEIGHT, dtype=dtype))
    optimizer = make([weight])
    for gradient in GRADIENTS[:steps]:
        weight.grad = torch.tensor(gradient, dtype=dtype)
        optimizer.step()
    return weight.detach()


def adam_by_hand(steps: int = 3, *, corrected: bool, decoupled: bool) -> Tensor:
    """Adam (Kingma and Ba, 2015, algorithm 1) and AdamW (Loshchilov and Hutter, 2019, algorithm 2)."""
    lr, (beta1, beta2), eps, decay = 0.1, (0.8, 0.9), 1e-6, 0.3
    weight = torch.tensor(WEIGHT, dtype=torch.float64)
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(torch.tensor(GRADIENTS[:steps], dtype=torch.float64), start=1):
        if decoupled:
            weight = weight * (1 - lr * decay)
        else:
            gradient = gradient + decay * weight
        mean, square = beta1 * mean + (1 - beta1) * gradient, beta2 * square + (1 - beta2) * gradient**2
        first, second = (1 - beta1**step, 1 - beta2**step) if corrected else (1.0, 1.0)
        weight = weight - lr * (mean / first) / ((square / second).sqrt() + eps)
    return weight


# Optimizers


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("steps", [1, 3])
def test_adam_is_that_of_the_papers(corrected: bool, decoupled: bool, fused: bool | None, steps: int) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        made = optimizers.FusedAdam(
            parameters,
            lr=0.1,
            bias_correction=corrected,
            betas=(0.8, 0.9),
            eps=1e-6,
            adam_w_mode=decoupled,
            weight_decay=0.3,
        )
        assert made.param_groups[0]["fused"] is True
        made.param_groups[0]["fused"] = fused
        return made

    # Float64 against float64; what is different is the order of the operations.
    torch.testing.assert_close(
        stepped(make, steps), adam_by_hand(steps, corrected=corrected, decoupled=decoupled), rtol=1e-12, atol=0
    )


def test_adam_without_bias_correction_counts_its_steps_and_goes_on_from_a_checkpoint() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = optimizers.FusedAdam([weight], bias_correction=False)
    for _ in range(3):
        weight.grad = torch.ones(2)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["step"].item() == 3
    other = nn.Parameter(weight.detach().clone())
    resumed = optimizers.FusedAdam([other])
    resumed.load_state_dict(saved)
    for one, its in ((optimizer, weight), (resumed, other)):
        its.grad = torch.full((2,), 0.5)
        one.step()
    assert torch.equal(weight, other)
    assert resumed.state[other]["step"].item() == 4


def test_groups_of_adam_may_differ_in_bias_correction() -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    groups = [{"params": first}, {"params": iter([second]), "bias_correction": False}]
    optimizer = optimizers.FusedAdam(groups, lr=1.0, betas=(0.9, 0.99), eps=0.0)
    first.grad, second.grad = torch.ones(1), torch.ones(1)
    optimizer.step()
    assert first.item() == pytest.approx(-1.0, rel=1e-6)
    assert second.item() == pytest.approx(-0.1 / 0.01**0.5, rel=1e-6)
    assert groups[0] == {"params": first}  # what came is not written to


SGD_OPTIONS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
]


@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
def test_sgd_is_pytorchs_bit_for_bit(options: dict[str, Any]) -> None:
    ours = stepped(lambda parameters: optimizers.FusedSGD(parameters, lr=0.1, **options))
    theirs = stepped(lambda parameters: torch.optim.SGD(parameters, lr=0.1, **options))
    assert torch.equal(ours, theirs)


def test_adagrad_is_pytorchs_bit_for_bit() -> None:
    ours = stepped(lambda parameters: optimizers.FusedAdagrad(parameters, lr=0.1, eps=1e-7, weight_decay=0.1))
    theirs = stepped(lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, eps=1e-7, weight_decay=0.1))
    assert torch.equal(ours, theirs)


MAKERS: dict[str, Make] = {
    "adam": lambda parameters: optimizers.FusedAdam(parameters, lr=0.25),
    "adam, no correction": lambda parameters: optimizers.FusedAdam(parameters, lr=0.25, bias_correction=False),
    "sgd": lambda parameters: optimizers.FusedSGD(parameters, lr=0.25, momentum=0.9),
    "adagrad": lambda parameters: optimizers.FusedAdagrad(parameters, lr=0.25),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_parameters_are_updated(name: str, dtype: torch.dtype) -> None:
    """PyTorch's fused SGD leaves them as they are on a CPU."""
    before = torch.tensor(WEIGHT, dtype=dtype)
    low, wide = stepped(MAKERS[name], 1, dtype), stepped(MAKERS[name], 1, torch.float32)
    large = before.abs() >= 1  # the third of each has a gradient that is small in these dtypes
    assert (low != before)[large].all()
    # A few roundings to 8 bits, and Adam's eps of 1e-8 is 0 in float16; gradients here are far above it.
    torch.testing.assert_close(low.float()[large], wide[large], rtol=0.03, atol=0.01)


@pytest.mark.parametrize("name", MAKERS)
def test_masters_of_a_prepared_model_are_stepped_as_a_float32_model_is(name: str) -> None:
    """The first step, from weights that bfloat16 has exactly and with gradients that it has exactly."""
    models = [nn.Linear(4, 2, bias=False) for _ in range(2)]
    for model in models:
        nn.init.constant_(model.weight, 0.5)
    made = [MAKERS[name](model.parameters()) for model in models]
    prepare(models[0], made[0], dtype=torch.bfloat16, low="**")
    x = torch.tensor([[1.0, 2.0, -1.0, 0.5]])
    for model, optimizer in zip(models, made, strict=True):
        model(x.to(model.weight.dtype)).float().sum().backward()
        optimizer.step()
    (master,), (weight,) = made[0].param_groups[0]["params"], models[1].parameters()
    assert master.dtype is torch.float32
    assert torch.equal(master, weight)
    assert torch.equal(models[0].weight, weight.bfloat16())


@pytest.mark.parametrize("kind", [optimizers.FusedAdam, optimizers.FusedSGD, optimizers.FusedAdagrad])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_does_what_the_constructor_was_told(kind: Any, to_none: bool) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = kind([weight], lr=0.1, set_grad_none=to_none)
    weight.grad = torch.ones(2)
    optimizer.zero_grad()
    assert (weight.grad is None) == to_none
    weight.grad = torch.ones(2)
    optimizer.zero_grad(set_to_none=not to_none)
    assert (weight.grad is None) != to_none


@pytest.mark.parametrize("kind", [optimizers.FusedAdam, optimizers.FusedSGD])
@pytest.mark.parametrize("form", ["list", "generator", "groups", "names"])
def test_parameters_come_in_every_form(kind: Any, form: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    forms: dict[str, Iterable[Any]] = {
        "list": list(model.parameters()),
        "generator": model.parameters(),
        "groups": [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}],
        "names": model.named_parameters(),
    }
    optimizer = kind(forms[form], lr=0.1)
    held = [one for group in optimizer.param_groups for one in group["params"]]
    assert [id(one) for one in held] == [id(one) for one in model.parameters()]


def test_what_is_no_list_of_parameters_gets_pytorchs_error() -> None:
    with pytest.raises(TypeError, match="params argument given to the optimizer should be an iterable of Tensors"):
        optimizers.FusedAdam(torch.ones(2))
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        optimizers.FusedAdam([])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [optimizers.FusedAdam, optimizers.FusedSGD])
def test_on_a_gpu_pytorchs_fused_kernels_are_used(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(2, device="cuda"))
    assert kind([weight], lr=0.1).param_groups[0]["fused"] is True
    mixed = kind([weight, nn.Parameter(torch.ones(2))], lr=0.1)
    assert not mixed.param_groups[0]["fused"] or kind is optimizers.FusedAdam


REFUSED: dict[str, tuple[Callable[[list[nn.Parameter]], object], str]] = {
    "amsgrad": (lambda p: optimizers.FusedAdam(p, amsgrad=True), r"torch.optim.AdamW\(amsgrad=True\)"),
    "masters": (lambda p: optimizers.FusedAdam(p, master_weights=True), 'opt_level="O2"'),
    "late decay": (lambda p: optimizers.FusedSGD(p, 0.1, wd_after_momentum=True), "torch.optim.AdamW"),
    "adagrad": (lambda p: optimizers.FusedAdagrad(p, adagrad_w_mode=True), "torch.optim.AdamW"),
    "lamb": (lambda p: optimizers.FusedLAMB(p, lr=0.1), "mezzo has no FusedLAMB. timm.optim.Lamb"),
    "mixed lamb": (optimizers.FusedMixedPrecisionLamb, "no FusedMixedPrecisionLamb. .*opt_level='O2'"),
    "novograd": (lambda p: optimizers.FusedNovoGrad(p, lr=0.1), "no FusedNovoGrad. timm.optim.NvNovoGrad"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_there_is_not_says_what_to_use(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(AmpError, match=message):
        make([nn.Parameter(torch.ones(2))])


def test_optimizers_that_there_are_not_can_be_asked_for() -> None:
    assert not isinstance(torch.optim.SGD([nn.Parameter(torch.ones(1))]), optimizers.FusedLAMB)
    assert issubclass(optimizers.FusedLAMB, torch.optim.Optimizer)


# Kernels


def test_there_are_no_kernels_and_a_call_says_so() -> None:
    assert multi_tensor_applier.available is MultiTensorApply.available is False
    assert multi_tensor_applier.chunk_size == 65536
    with pytest.raises(
        AmpError, match=r"ask for multi_tensor_applier.available first. PyTorch has torch._foreach_mul_"
    ):
        multi_tensor_applier(None, torch.zeros(1), [[torch.ones(1)]], 2.0)


# Norms


@pytest.mark.parametrize("shape", [4, [4], (3, 4), torch.Size([4])], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_norms_are_pytorchs_bit_for_bit(shape: Any, affine: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4)
    listed = [shape] if isinstance(shape, int) else list(shape)
    layer = normalization.FusedLayerNorm(shape, eps=1e-3, elementwise_affine=affine, memory_efficient=True)
    rms = normalization.FusedRMSNorm(shape, 1e-3, affine, memory_efficient=True)
    if affine:
        for one in (*layer.parameters(), *rms.parameters()):
            nn.init.normal_(one)
    assert torch.equal(layer(x), F.layer_norm(x, listed, layer.weight, layer.bias, 1e-3))
    assert torch.equal(rms(x), F.rms_norm(x, listed, rms.weight, 1e-3))
    assert isinstance(layer, nn.LayerNorm)
    assert isinstance(rms, nn.RMSNorm)


@pytest.mark.parametrize("kind", [normalization.MixedFusedLayerNorm, normalization.MixedFusedRMSNorm])
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_mixed_norms_give_the_dtype_of_the_weight(kind: Any, low: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4).to(low)
    norm = kind(4, eps=1e-3)
    assert norm(x).dtype is torch.float32
    assert torch.equal(norm(x), kind.__mro__[2].forward(norm, x.float()))
    assert norm.to(low)(x.float()).dtype is low
    assert torch.equal(pickle.loads(pickle.dumps(norm))(x), norm(x))


@pytest.mark.parametrize("kind", [normalization.MixedFusedLayerNorm, normalization.MixedFusedRMSNorm])
def test_a_mixed_norm_has_a_weight(kind: Any) -> None:
    assert kind(4, elementwise_affine=True, memory_efficient=True).weight.shape == (4,)
    with pytest.raises(AmpError, match=rf"elementwise_affine=False is not there. {kind.__name__[5:]} has it."):
        kind(4, elementwise_affine=False)


def test_norms_as_functions_are_pytorchs() -> None:
    """Old BERT scripts call `FusedLayerNormAffineFunction.apply`."""
    x, weight, bias = torch.randn(3, 8, requires_grad=True), torch.rand(8, requires_grad=True), torch.rand(8)
    pairs = [
        (normalization.fused_layer_norm(x, 8), F.layer_norm(x, [8], eps=1e-6)),
        (normalization.fused_layer_norm_affine(x, weight, bias, (8,), 1e-3), F.layer_norm(x, [8], weight, bias, 1e-3)),
        (normalization.fused_rms_norm(x, 8), F.rms_norm(x, [8], eps=1e-6)),
        (normalization.fused_rms_norm_affine(x, weight, [8]), F.rms_norm(x, [8], weight, 1e-6)),
        (normalization.FusedLayerNormFunction.apply(x, 8), F.layer_norm(x, [8], eps=1e-6)),
        (
            normalization.FusedLayerNormAffineFunction.apply(x, weight, bias, torch.Size([8])),
            F.layer_norm(x, [8], weight, bias, 1e-6),
        ),
    ]
    for found, wanted in pairs:
        assert torch.equal(found, wanted)
        assert torch.equal(
            *(torch.autograd.grad(each.square().sum(), x, retain_graph=True)[0] for each in (found, wanted))
        )
