"""Which parameters are stored low: the rule, module by module, and which policy it asks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from mezzo import Policy
from mezzo.errors import PreparationError
from mezzo.torch import autocast, set_precision
from mezzo.torch.masters.low_parameters import Choice, choose
from tests.torch.named_model import Model
from tests.torch.prepare.choosing import CELL, LAYER, LOW, WEIGHT, chosen, of, reasons

RUNS, NOT = " runs in lower precision", " does not run in lower precision"
KERNELS = " leaves its weights to kernels that differ by device"
PACKED = ("in_proj_weight", "in_proj_bias")
OUT = ("out_proj.weight", "out_proj.bias")

ROWS: list[tuple[Callable[[], nn.Module], dict[str, str]]] = [
    (lambda: nn.Linear(2, 2), of("linear" + RUNS, *WEIGHT)),
    (lambda: nn.Linear(2, 2, bias=False), of("linear" + RUNS, "weight")),
    (lambda: nn.Conv1d(2, 2, 3), of("conv1d" + RUNS, *WEIGHT)),
    (lambda: nn.Conv2d(2, 2, 3), of("conv2d" + RUNS, *WEIGHT)),
    (lambda: nn.Conv2d(2, 2, 3, padding="same"), of("conv2d" + RUNS, *WEIGHT)),
    (lambda: nn.Conv2d(2, 2, 3, padding="same", padding_mode="circular"), of("conv2d" + RUNS, *WEIGHT)),
    (lambda: nn.Conv3d(2, 2, 3), of("conv3d" + RUNS, *WEIGHT)),
    (lambda: nn.ConvTranspose1d(2, 2, 3), of("conv_transpose1d" + RUNS, *WEIGHT)),
    (lambda: nn.ConvTranspose2d(2, 2, 3), of("conv_transpose2d" + RUNS, *WEIGHT)),
    (lambda: nn.ConvTranspose3d(2, 2, 3), of("conv_transpose3d" + RUNS, *WEIGHT)),
    (lambda: nn.Bilinear(2, 2, 2), of("bilinear" + NOT, *WEIGHT)),
    (nn.PReLU, of("prelu" + RUNS, "weight")),
    (lambda: nn.MultiheadAttention(4, 2), of("linear" + RUNS, *PACKED, *OUT)),
    (
        lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True, kdim=3, vdim=3),
        of("linear" + RUNS, "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", *OUT)
        | of("cat" + NOT, "bias_k", "bias_v"),
    ),
    (lambda: nn.Embedding(4, 2), of("embedding" + NOT, "weight")),
    (lambda: nn.EmbeddingBag(4, 2), of("embedding_bag" + NOT, "weight")),
    (lambda: nn.LayerNorm(2), of("layer_norm" + NOT, *WEIGHT)),
    (lambda: nn.RMSNorm(2), of("rms_norm" + NOT, "weight")),
    (lambda: nn.GroupNorm(1, 2), of("group_norm" + NOT, *WEIGHT)),
    (lambda: nn.BatchNorm2d(2), of("batch_norm" + NOT, *WEIGHT)),
    (lambda: nn.InstanceNorm1d(2, affine=True), of("instance_norm" + NOT, *WEIGHT)),
    (lambda: nn.SyncBatchNorm(2), of("forward is overridden", *WEIGHT)),
    (lambda: nn.LSTM(2, 2), of("lstm" + KERNELS, *LAYER)),
    (lambda: nn.GRU(2, 2), of("gru" + KERNELS, *LAYER)),
    (lambda: nn.RNN(2, 2, nonlinearity="relu"), of("rnn_relu" + KERNELS, *LAYER)),
    (lambda: nn.LSTMCell(2, 2), of("linear" + RUNS, *CELL)),
    (lambda: nn.GRUCell(2, 2), of("linear" + RUNS, *CELL)),
    (lambda: nn.RNNCell(2, 2, nonlinearity="relu"), of("linear" + RUNS, *CELL)),
]
LOW_ROWS = [make for make, expected in ROWS if any(reason.endswith(RUNS) for reason in expected.values())]
LOW_IDS = [f"{number}-{type(make()).__name__}" for number, make in enumerate(LOW_ROWS)]
IDS = [f"{number}-{type(make()).__name__}" for number, (make, _) in enumerate(ROWS)]


@pytest.mark.parametrize(("make", "expected"), ROWS, ids=IDS)
def test_a_module_of_pytorch_goes_by_the_op_that_reads_its_parameters(
    make: Callable[[], nn.Module], expected: dict[str, str]
) -> None:
    model = make()
    assert reasons(model) == expected
    assert chosen(model) == [name for name, reason in expected.items() if reason.endswith(RUNS)]


def arguments(module: nn.Module) -> tuple[Tensor, ...]:
    """Make a batch that a module of the table takes."""
    if isinstance(module, nn.MultiheadAttention):
        return torch.rand(3, 1, 4), torch.rand(3, 1, module.kdim), torch.rand(3, 1, module.vdim)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d):
        return (torch.rand(2, 2, *[5] * len(module.kernel_size)),)
    return (torch.rand(2, 2, 4, 4, 4) if isinstance(module, nn.ConvTranspose3d) else torch.rand(3, 2),)


def outputs_and_gradients(model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    with autocast("cpu", dtype=dtype):
        out = model(*arguments(model))
    out = torch.cat([part.float().flatten() for part in out]) if isinstance(out, tuple) else out.float().flatten()
    (out * torch.linspace(-1, 1, out.numel())).sum().backward()
    return [out.detach(), *(parameter.grad.to(dtype) for parameter in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", LOW_ROWS, ids=LOW_IDS)
def test_what_is_chosen_can_be_stored_low_without_a_change_of_any_bit(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = make()
    stored = copy.deepcopy(model)
    for choice in choose(stored, dtype, None, (), ()):
        if choice.low:
            choice.parameter.data = choice.parameter.data.to(dtype)
    for one, other in zip(outputs_and_gradients(model, dtype), outputs_and_gradients(stored, dtype), strict=True):
        assert torch.equal(one, other)


def test_of_a_transformer_layer_all_but_the_norms_go_low() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8)
    low = chosen(layer)
    assert low == [name for name, _ in layer.named_parameters() if not name.startswith("norm")]
    assert "self_attn.in_proj_weight" in low


def test_of_a_convolutional_net_all_but_the_batch_norms_go_low() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    assert chosen(net) == ["0.weight", "4.weight", "4.bias"]


def test_a_weight_that_an_embedding_and_a_linear_share_is_kept() -> None:
    choice = choose(Model(), LOW, None, (), ())[0]
    assert choice.names == ("embed.weight", "lm_head.weight")
    assert (choice.low, choice.reason) == (False, "embedding does not run in lower precision")
    net = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Embedding(4, 2))
    net[1].weight = net[0].weight
    assert reasons(net) == {"0.weight": "embedding does not run in lower precision, as '1.weight'"}


def test_a_weight_that_two_linears_share_goes_low_under_both_names() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    assert choose(net, LOW, None, (), ()) == [
        Choice("0.weight", ("0.weight", "1.weight"), net[0].weight, True, "linear runs in lower precision")
    ]


# Modules that read their parameters otherwise


class LoRA(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.down, self.up = nn.Parameter(torch.rand(1, 4)), nn.Parameter(torch.zeros(4, 1))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - PyTorch's name
        return super().forward(input) + F.linear(F.linear(input, self.down), self.up)


class Standardized(nn.Conv1d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
        return super()._conv_forward(input, weight - weight.mean(), bias)


class Calling(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2, self.bias)


class Named(nn.Linear):
    """Reads its parameters as `nn.Linear` does."""


def test_a_subclass_with_a_forward_of_its_own_is_kept() -> None:
    assert reasons(LoRA()) == of("forward is overridden", "weight", "bias", "down", "up")
    assert reasons(Standardized(2, 2, 1)) == of("forward is overridden", *WEIGHT)
    assert reasons(Calling(2, 2)) == of("forward is overridden", *WEIGHT)
    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x @ patched.weight  # type: ignore[method-assign]
    assert reasons(patched) == of("forward is overridden", *WEIGHT)


def test_a_subclass_with_its_parents_forward_goes_low_but_not_what_it_adds() -> None:
    named = Named(2, 2)
    named.scale = nn.Parameter(torch.ones(2))
    assert reasons(named) == of("linear runs in lower precision", *WEIGHT) | {
        "scale": "what reads 'scale' is not known"
    }


def test_a_module_that_is_not_pytorchs_is_kept_and_what_is_in_it_is_not() -> None:
    net = nn.ModuleDict({"head": nn.Linear(2, 2), "scales": nn.ParameterList([torch.ones(1)])})
    net.temperature = nn.Parameter(torch.ones(()))
    assert reasons(net) == {
        "temperature": "what reads the parameters of ModuleDict is not known",
        **of("linear runs in lower precision", "head.weight", "head.bias"),
        "scales.0": "what reads the parameters of ParameterList is not known",
    }


def test_an_embedding_that_renormalizes_is_kept_under_any_policy() -> None:
    policy = Policy("all", default="lower_precision_fp")
    assert chosen(nn.Embedding(4, 2), policy=policy) == ["weight"]
    assert reasons(nn.Embedding(4, 2, max_norm=1.0), policy=policy) == {
        "weight": "max_norm writes to it in each forward"
    }


def test_of_a_parametrized_module_only_the_other_parameters_go_low() -> None:
    expected = of("linear runs in lower precision", "bias") | of(
        "it is parametrized, so other ops read it",
        "parametrizations.weight.original0",
        "parametrizations.weight.original1",
    )
    assert reasons(parametrizations.weight_norm(nn.Linear(2, 2))) == expected


def test_the_parameters_of_a_parametrization_are_kept() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, weight: Tensor) -> Tensor:
            return weight * self.scale

    linear = nn.Linear(2, 2)
    parametrize.register_parametrization(linear, "weight", Scale())
    assert chosen(linear) == ["bias"]


def test_what_a_hook_of_old_style_norms_reads_is_kept() -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        norm = nn.utils.weight_norm(nn.Linear(2, 2))
    assert reasons(norm) == of("linear runs in lower precision", "bias") | {
        name: f"what reads {name!r} is not known" for name in ("weight_g", "weight_v")
    }


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="came with PyTorch 2.13")
def test_the_layer_inside_of_a_fused_loss_is_kept() -> None:
    loss = nn.LinearCrossEntropyLoss(4, 5, bias=True)  # type: ignore[attr-defined]
    assert reasons(loss) == of("LinearCrossEntropyLoss reads it in ops of its own", "linear.weight", "linear.bias")


def test_a_parameter_without_a_shape_is_an_error() -> None:
    net = nn.Sequential(nn.LazyLinear(2))
    message = r"^'0\.weight' of LazyLinear has no shape before the model has run\. Run one forward with a batch first"
    with pytest.raises(PreparationError, match=message):
        choose(net, LOW, None, (), ())
    net(torch.rand(1, 3))
    assert chosen(net) == ["0.weight", "0.bias"]


# What stays as it is


def test_wrappers_inside_a_model_are_looked_through_and_names_are_pytorchs() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), torch.compile(nn.Linear(2, 2), backend="eager"))
    assert chosen(net) == [name for name, _ in net.named_parameters()]
    assert chosen(net, keep="0.weight") == [name for name, _ in net.named_parameters()][1:]
    assert len(chosen(net, keep="1")) == 2


def test_float64_goes_low_only_if_it_is_selected_and_other_dtypes_never() -> None:
    net = nn.ModuleDict({"wide": nn.Linear(2, 2, bias=False).double(), "low": nn.Linear(2, 2, bias=False).to(LOW)})
    net.small = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
    net.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    net.count = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    expected = {
        "small": "float8_e4m3fn is never stored in another dtype",
        "wide.weight": "float64 is kept unless it is selected",
        "low.weight": "bfloat16 is never stored in another dtype",
    }
    assert reasons(net) == expected
    assert reasons(net, low="**") == expected | {"wide.weight": "selected by '**'"}


def test_nothing_of_the_model_or_of_the_thread_changes() -> None:
    torch.manual_seed(0)
    net = Model()
    set_precision(net, {"lm_head": "fp32", "blocks.0": {"linear": "fp32"}})
    hooks = {name: (dict(m._forward_hooks), dict(m._forward_pre_hooks)) for name, m in net.named_modules()}
    before = {name: (id(p), p._version, p.dtype, p.data_ptr(), p.clone()) for name, p in net.named_parameters()}
    drawn = torch.get_rng_state()
    assert chosen(net, low="embed", keep="blocks.1.mlp")
    for name, parameter in net.named_parameters():
        *same, values = before[name]
        assert same == [id(parameter), parameter._version, parameter.dtype, parameter.data_ptr()]
        assert torch.equal(values, parameter)
    assert hooks == {name: (dict(m._forward_hooks), dict(m._forward_pre_hooks)) for name, m in net.named_modules()}
    assert torch.equal(drawn, torch.get_rng_state())
