"""Casting models and their optimizers' state: the dtypes of each level, and what stays the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.apex.amp._amp_state import master_params
from mezzo.apex.amp.inputs import CastInputs, CastOutputs
from mezzo.errors import AmpOptionError
from mezzo.torch.masters.params import masters_in

from .cast_nets import FULL, HALF, LOW, LOWS, WIDE, adam, initialize, mlp, net, sgd, train_step


def low(dtype: torch.dtype) -> list[torch.dtype]:
    return [dtype] * 6


# The dtypes of conv and linear weights, instance, group and layer norm weights, and of the float64 buffer; those of the
# batch norm's weight and running mean; that of the running mean without weights.
TABLE = [
    ("O0", {}, [FULL] * 6, [FULL] * 2, FULL),
    ("O1", {}, [*[FULL] * 5, WIDE], [FULL] * 2, FULL),
    ("O2", {}, low(HALF), [FULL] * 2, FULL),
    ("O2", {"keep_batchnorm_fp32": False}, low(HALF), [HALF] * 2, HALF),
    ("O2", {"keep_batchnorm_fp32": "False"}, low(HALF), [HALF] * 2, HALF),
    ("O3", {}, low(HALF), [HALF] * 2, HALF),
    ("O3", {"keep_batchnorm_fp32": True}, low(HALF), [FULL] * 2, FULL),
    ("O3", {"master_weights": True}, low(HALF), [HALF] * 2, HALF),
    ("O2", {"master_weights": False}, low(HALF), [FULL] * 2, FULL),
    ("O0", {"master_weights": True}, [FULL] * 6, [FULL] * 2, FULL),
    *((level, {"cast_model_type": False}, [*[FULL] * 5, WIDE], [FULL] * 2, FULL) for level in ("O0", "O1", "O2", "O3")),
    ("O2", {"dtype": LOW}, low(LOW), [FULL] * 2, FULL),
    ("O2", {"cast_model_type": LOW}, low(LOW), [FULL] * 2, FULL),
    ("O3", {"dtype": LOW}, low(LOW), [LOW] * 2, LOW),
    ("O0", {"cast_model_type": WIDE}, [WIDE] * 6, [WIDE] * 2, WIDE),
]


@pytest.mark.parametrize(("level", "overrides", "expected", "batch", "plain"), TABLE)
def test_the_dtypes_of_each_level(level: str, overrides: Any, expected: Any, batch: Any, plain: torch.dtype) -> None:
    model = net()
    initialize(model, sgd(model), level, **overrides)
    weights = (model.conv, model.linear, model.instance, model.group, model.layer)
    assert [*(one.weight.dtype for one in weights), model.wide.dtype] == expected  # type: ignore[union-attr]
    assert [model.batch.weight.dtype, model.batch.running_mean.dtype] == batch  # type: ignore[union-attr]
    assert model.plain.running_mean is not None
    assert model.plain.running_mean.dtype is plain
    assert model.instance.running_mean is not None
    assert model.instance.running_mean.dtype is expected[2]
    assert (model.count.dtype, model.phase.dtype) == (torch.int64, torch.complex64)
    assert model.batch.num_batches_tracked is not None
    assert model.batch.num_batches_tracked.dtype is torch.int64


@pytest.mark.parametrize("dtype", LOWS)
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_a_model_of_all_kinds_runs_and_trains(level: str, dtype: torch.dtype) -> None:
    model = net()
    optimizer = sgd(model)
    initialize(model, optimizer, level, dtype=dtype)
    # What comes before a norm hardly changes what it gives.
    moving = [model.linear.weight, model.layer.weight, model.group.bias]
    before = [one.detach().clone() for one in moving]
    out = model(torch.rand(4, 2, 3, dtype=WIDE))
    assert out.dtype is FULL
    out.square().mean().backward()
    optimizer.step()
    assert not any(torch.equal(one, old) for one, old in zip(moving, before, strict=True))
    assert all(bool(one.isfinite().all()) for one in model.parameters())
    assert model.plain.running_mean is not None
    assert bool(model.plain.running_mean.isfinite().all())


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norms_compute_on_low_inputs(level: str, affine: bool) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, affine=affine))
    twin = copy.deepcopy(model)
    initialize(model, level=level)
    x = torch.rand(4, 2, 5, 5)
    # float16 has 11 bits; the outputs are normalized, so a few units of 2^-11.
    torch.testing.assert_close(model(x), twin(x), atol=1e-2, rtol=1e-2)
    tolerance = 0.0 if level == "O0" else 2e-3
    torch.testing.assert_close(model[1].running_var.float(), twin[1].running_var, atol=tolerance, rtol=tolerance)


def test_o1_changes_nothing_in_a_model() -> None:
    model = net()
    optimizer = sgd(model)
    before = [*model.parameters(), *model.buffers()]
    initialize(model, optimizer, "O1")
    assert all(one is other for one, other in zip(before, [*model.parameters(), *model.buffers()], strict=True))
    assert not [hooks for one in model.modules() for hooks in (one._forward_hooks, one._state_dict_hooks) if hooks]
    assert model(torch.rand(4, 2, 3)).dtype is WIDE


@pytest.mark.parametrize(
    ("level", "overrides", "inputs", "outputs"),
    [
        ("O0", {}, FULL, FULL),
        ("O1", {}, None, None),
        ("O1", {"outputs": HALF}, None, HALF),
        ("O2", {}, HALF, FULL),
        ("O2", {"outputs": HALF}, HALF, HALF),
        ("O2", {"cast_model_type": False}, None, None),
        ("O2", {"cast_model_type": False, "outputs": HALF}, None, HALF),
        ("O3", {"dtype": LOW}, LOW, FULL),
        ("O3", {"dtype": LOW, "outputs": WIDE}, LOW, WIDE),
    ],
)
def test_inputs_and_outputs_are_cast(level: str, overrides: Any, inputs: Any, outputs: Any) -> None:
    seen = []

    class Echo(nn.Module):
        def forward(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
            seen.append(x.dtype)
            return x, words

    model = Echo()
    initialize(model, level=level, **overrides)
    x, words = model(torch.ones(2, dtype=WIDE), words=torch.ones(2, dtype=torch.int64))
    assert seen == [WIDE if inputs is None else inputs]
    assert x.dtype is (WIDE if outputs is None else outputs)
    assert words.dtype is torch.int64


def test_outputs_in_a_dtype_without_fractions_are_refused() -> None:
    model = mlp()
    for wrong in (torch.int64, "float32"):
        with pytest.raises(AmpOptionError, match="cast_model_outputs is a dtype of floating-point numbers"):
            initialize(model, outputs=wrong)  # type: ignore[arg-type]
    assert model[0].weight.dtype is FULL


def test_only_the_models_that_were_given_cast_their_inputs() -> None:
    model = mlp()
    initialize(model)
    assert model(torch.rand(1, 4)).dtype is FULL
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        model[0](torch.rand(1, 4))


def test_a_second_call_takes_the_place_of_the_first_casts() -> None:
    model = mlp()
    initialize(model, level="O0")
    initialize(model, level="O0", cast_model_type=WIDE, outputs=HALF)
    assert list(model._forward_pre_hooks.values()) == [CastInputs(WIDE)]
    assert list(model._forward_hooks.values()) == [CastOutputs(HALF)]
    assert model(torch.rand(1, 4)).dtype is HALF
    assert [len(one._state_dict_hooks) for one in model.modules()] == [1] * 4
    initialize(model, level="O1")
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_parameters_stay_the_same_objects_with_their_gradients_and_flags(level: str) -> None:
    model = mlp().double()
    before = list(model.parameters())
    model[0].bias.requires_grad_(False)
    model(torch.rand(1, 4, dtype=WIDE)).sum().backward()
    gradients = [None if one.grad is None else one.grad.clone() for one in before]
    initialize(model, sgd(model), level)
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert [one.requires_grad for one in before] == [True, False, True, True]
    for one, gradient in zip(before, gradients, strict=True):
        assert (one.grad is None) == (gradient is None)
        if one.grad is not None and gradient is not None:
            # Of float16 gradients at O3: 11 bits.
            torch.testing.assert_close(one.grad.double(), gradient, atol=0, rtol=1e-7 if level != "O3" else 2**-11)


@pytest.mark.parametrize("source", [FULL, WIDE])
@pytest.mark.parametrize(
    ("level", "overrides", "state"),
    [
        ("O0", {}, FULL),
        ("O2", {}, FULL),
        ("O3", {"master_weights": True}, FULL),
        ("O3", {}, FULL),
        ("O3", {"dtype": LOW}, LOW),
    ],
)
def test_the_state_of_an_optimizer_goes_along(source: Any, level: str, overrides: Any, state: torch.dtype) -> None:
    model = mlp().to(source)
    optimizer = adam(model)
    for _ in range(2):
        model(torch.rand(3, 4, dtype=source)).square().sum().backward()
        optimizer.step()
    expected = [optimizer.state[one]["exp_avg_sq"].clone() for one in model.parameters()]
    initialize(model, optimizer, level, **overrides)
    held = [one for group in optimizer.param_groups for one in group["params"]]
    assert [optimizer.state[one]["exp_avg_sq"].dtype for one in held] == [state] * 4
    assert [int(optimizer.state[one]["step"]) for one in held] == [2] * 4
    for one, old in zip(held, expected, strict=True):
        # bfloat16 has 8 bits.
        torch.testing.assert_close(optimizer.state[one]["exp_avg_sq"].to(source), old, atol=0, rtol=2**-8)
    train_step(model, optimizer)
    assert all(bool(one.isfinite().all()) for one in model.parameters())
    assert [int(optimizer.state[one]["step"]) for one in held] == [3] * 4


def test_at_o0_training_is_that_of_float32_bit_for_bit() -> None:
    model, twin = mlp(), mlp()
    optimizer, its_own = adam(model), adam(twin)
    initialize(model, optimizer, "O0", master_weights=True)
    for step in range(3):
        assert torch.equal(train_step(model, optimizer, step), train_step(twin, its_own, step))
    assert not masters_in(optimizer)


@pytest.mark.parametrize("dtype", LOWS)
def test_masters_begin_with_the_float32_values_and_train_like_float32(dtype: torch.dtype) -> None:
    model, twin = mlp(), mlp()
    optimizer, its_own = adam(model), adam(twin)
    initialize(model, optimizer, dtype=dtype)
    assert all(
        torch.equal(one, weight) for one, weight in zip(master_params(optimizer), twin.parameters(), strict=True)
    )
    for step in range(20):
        train_step(model, optimizer, step)
        train_step(twin, its_own, step)
    for one, weight in zip(master_params(optimizer), twin.parameters(), strict=True):
        # 20 steps of 1e-3 each; gradients near 0 may differ in sign between the precisions.
        torch.testing.assert_close(one.detach(), weight.detach(), atol=5e-3, rtol=0)
    assert all(torch.equal(one.model_param, one.to(dtype)) for one in masters_in(optimizer))


@pytest.mark.parametrize("dtype", LOWS)
def test_a_parameter_that_is_unfrozen_later_trains_in_float32(dtype: torch.dtype) -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    optimizer = sgd(model, lr=1e-4)
    initialize(model, optimizer, dtype=dtype)
    start = next(iter(master_params(optimizer))).detach().clone()
    train_step(model, optimizer)
    assert torch.equal(next(iter(master_params(optimizer))), start)
    model[0].weight.requires_grad_(True)
    train_step(model, optimizer)
    moved = (next(iter(master_params(optimizer))) - start).abs().max()
    assert 0 < moved < 1e-3


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_tied_weights_stay_tied(level: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("one", torch.ones(2, dtype=WIDE))
            self.register_buffer("other", self.one)

        def forward(self, words: Tensor) -> Tensor:
            out: Tensor = self.head(self.embedding(words))
            return out

    model = Tied()
    optimizer = sgd(model)
    initialize(model, optimizer, level)
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.dtype is model.one.dtype is (FULL if level == "O0" else HALF)
    assert model.one is model.other
    model(torch.tensor([1, 2])).square().sum().backward()
    optimizer.step()
    assert len(list(master_params(optimizer))) == 1


@pytest.mark.parametrize("dtype", LOWS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_rnns_run_in_the_lower_precision(kind: Any, dtype: torch.dtype, level: str) -> None:
    torch.manual_seed(0)
    model = kind(4, 4)
    twin = copy.deepcopy(model)
    optimizer = sgd(model)
    initialize(model, optimizer, level, dtype=dtype)
    x = torch.rand(3, 2, 4)
    out, state = model(x)
    assert model.weight_hh_l0.dtype is dtype
    assert out.dtype is FULL
    assert (state[0] if kind is nn.LSTM else state).dtype is FULL
    # bfloat16 has 8 bits, and there are three steps.
    torch.testing.assert_close(out, twin(x)[0], atol=3e-2, rtol=3e-2)
    out.sum().backward()
    optimizer.step()
    packed = nn.utils.rnn.pack_sequence([torch.rand(2, 4), torch.rand(1, 4)])
    assert model(packed)[0].data.dtype is FULL


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_a_model_that_is_initialized_in_inference_mode_can_be_trained_later(level: str) -> None:
    model = mlp().double()
    optimizer = sgd(model)
    with torch.inference_mode():
        initialize(model, optimizer, level)
        assert model(torch.rand(1, 4)).dtype is FULL
    before = model[0].weight.detach().clone()
    train_step(model, optimizer)
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_parametrized_weights_are_cast(level: str) -> None:
    parametrizations = nn.utils.parametrizations
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        parametrizations.weight_norm(nn.BatchNorm1d(4)),
    )
    optimizer = sgd(model)
    initialize(model, optimizer, level)
    assert model[0].parametrizations.weight.original0.dtype is model[1].parametrizations.weight[0]._u.dtype is HALF
    assert model[2].parametrizations.weight.original0.dtype is (FULL if level == "O2" else HALF)
    train_step(model, optimizer)
    assert model(torch.rand(3, 4)).dtype is FULL


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LOWS)
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norms_compute_on_low_inputs_on_a_gpu(affine: bool, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, affine=affine)).cuda()
    twin = copy.deepcopy(model)
    initialize(model, dtype=dtype)
    x = torch.rand(4, 2, 5, 5, device="cuda")
    out = model(x)
    # bfloat16 has 8 bits; the outputs are normalized.
    torch.testing.assert_close(out, twin(x), atol=6e-2, rtol=6e-2)
    out.square().sum().backward()
    assert model[1].running_mean.dtype is FULL
    assert model[0].weight.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_weights_of_rnns_are_in_one_piece_on_a_gpu(kind: Any) -> None:
    """PyTorch warns where they are not, and warnings are errors here."""
    torch.manual_seed(0)
    model = kind(4, 4).cuda()
    optimizer = sgd(model)
    values = [one.detach().clone() for one in model.parameters()]
    initialize(model, optimizer)
    assert all(torch.equal(one, old) for one, old in zip(master_params(optimizer), values, strict=True))
    for _ in range(2):
        model(torch.rand(3, 2, 4, device="cuda"))[0].sum().backward()
        optimizer.step()
    assert all(torch.equal(one.model_param, one.half()) for one in masters_in(optimizer))
