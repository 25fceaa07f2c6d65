"""The float32 run beside the real one has the numbers that a float32 run has."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.torch import autocast
from mezzo.torch.shadowing.attention import attention_for
from mezzo.torch.shadowing.error import relative_error

from .following import Following

LOW = [torch.bfloat16, torch.float16]

# The float32 run's ops are the same, in the same order; kernels may still sum in another order for another layout.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Mixed(nn.Module):
    """Convolution, norms, attention, recurrence, embedding and views."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.rnn = nn.GRU(16, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.conv(self.embed(tokens).transpose(1, 2))).transpose(1, 2)
        x = self.rnn(self.block(x))[0]
        left, right = x.chunk(2, dim=1)
        return self.head(torch.cat([right, left.flip(1)], dim=1))


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_step_of_a_model_has_the_float32_runs_output_gradients_and_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, tokens = Mixed(), torch.randint(0, 11, (4, 6))
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Following() as mode:
        with autocast("cpu", dtype=dtype):
            out = model(tokens)
        out.float().square().sum().backward()
        optimizer.step()
    plain = twin(tokens)
    plain.square().sum().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9).step()
    assert out.dtype is dtype
    assert 0 < relative_error(out, plain) < 0.05
    torch.testing.assert_close(mode.shadow.of(out), plain.detach(), **CLOSE)
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(mode.shadow.of(one.grad), other.grad, rtol=1e-4, atol=1e-5, msg=name)
        torch.testing.assert_close(mode.shadow.of(one), other.detach(), rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(mode.shadow.of(model.norm.running_var), twin.norm.running_var, **CLOSE)


def _slices(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[1:, ::2] = y[1:, ::2]
    x.t()[0].mul_(3)
    x.view(-1)[5:9].add_(y.reshape(-1)[:4])
    return x


def _buffer(x: Tensor, y: Tensor) -> Tensor:
    cache = torch.empty(4, 6, 8, dtype=x.dtype)
    for place, value in enumerate((x, y, x * y, x + y)):
        cache[place] = value
    return cache.sum(0)


def _out(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.add(x, y, out=out)
    return out


def _foreach(x: Tensor, y: Tensor) -> Tensor:
    both = [x.clone(), y.clone()]
    torch._foreach_mul_(both, [y, x])
    torch._foreach_add_(both, 1.0)
    return torch.stack(torch._foreach_sqrt(torch._foreach_abs(both)))


def _rotary(x: Tensor, y: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.float().reshape(6, 4, 2)) * torch.polar(torch.ones(4), torch.arange(4.0))
    return torch.view_as_real(turned).flatten(1).type_as(x) + y


def _scatter(x: Tensor, y: Tensor) -> Tensor:
    places = torch.tensor([0, 2, 2])
    return (x / 3).index_add(0, places, y[:3]).index_put((places[:2],), y[:2]).scatter(1, torch.zeros(6, 1).long(), 2.0)


def _norms(x: Tensor, y: Tensor) -> Tensor:
    return F.softmax(F.layer_norm(x, (8,)), -1) + F.group_norm(y, 2) + F.rms_norm(x, (8,))


PROGRAMS = [_slices, _buffer, _out, _foreach, _rotary, _scatter, _norms]


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.strip("_"))
def test_programs_on_low_tensors_are_followed_in_float32(
    program: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 8).to(dtype), torch.randn(6, 8).to(dtype)
    with Following() as mode:
        out = program(x, y)
    assert torch.equal(out, program(x, y))
    torch.testing.assert_close(mode.shadow.of(out), program(x.float(), y.float()), **CLOSE)
    assert mode.shadow.of(out).dtype is torch.float32  # type: ignore[union-attr]
    assert relative_error(out, program(x.float(), y.float())) > 0


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_inference_mode_is_followed_though_ops_come_as_a_whole_there(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(8, 8), torch.randn(3, 8)
    with torch.inference_mode(), Following() as mode:
        with autocast("cpu", dtype=dtype):
            out = F.scaled_dot_product_attention(*[linear(x)[None, None]] * 3).to(dtype)
        wanted = F.scaled_dot_product_attention(*[linear(x)[None, None]] * 3)
    torch.testing.assert_close(mode.shadow.of(out), wanted, **CLOSE)


def test_a_cast_that_float32_does_not_need_shares_no_memory_with_the_real_run() -> None:
    torch.manual_seed(0)
    x = torch.randn(8)
    kept = x.clone()
    with torch.inference_mode(), Following() as mode:
        low = x.to(torch.bfloat16)  # in float32 this gives x itself
        low.mul_(2)
    assert torch.equal(x, kept)
    assert torch.equal(mode.shadow.of(low), kept * 2)  # type: ignore[arg-type]


def test_the_error_of_a_view_is_that_of_its_part() -> None:
    with Following() as mode:
        low = torch.tensor([1.0, 1.0 / 3]).bfloat16()
        plain = torch.ones(2)
    part = low[1:]
    assert mode.shadow.error(low[:1]) == mode.shadow.error(plain) == 0.0
    assert mode.shadow.error(part) == pytest.approx(abs(float(part) * 3 - 1), rel=1e-4)  # 1/3 is rounded to float32
    assert mode.shadow.error(torch.arange(2)) is mode.shadow.error(plain.to("meta")) is None


def test_a_constant_that_the_dtype_cannot_hold_is_wholly_lost() -> None:
    with Following() as mode:
        eps = torch.full((2,), 1e-8, dtype=torch.float16)
        places = torch.arange(260, dtype=torch.bfloat16)
    assert eps.count_nonzero() == 0
    assert mode.of("full") == [1.0]
    assert torch.equal(mode.shadow.of(places), torch.arange(260.0))  # type: ignore[arg-type]


def test_ops_of_float32_numbers_have_no_error_and_no_shadow() -> None:
    with Following() as mode:
        out = torch.ones(3, 3) @ torch.ones(3, 3)
        places = out.argmax()
    assert mode.of("mm") == [0.0]
    assert mode.of("argmax") == [None]
    assert places == 0
    assert mode.shadow.storages == 0


def test_an_exact_cast_needs_no_shadow() -> None:
    with Following() as mode:
        kept = torch.ones(64).bfloat16()
    assert kept.dtype is torch.bfloat16
    assert mode.of("_to_copy") == [0.0]
    assert mode.shadow.nbytes == 0


def test_dropout_drops_of_the_float32_run_what_it_drops_of_the_real_one() -> None:
    torch.manual_seed(0)
    x = torch.randn(50)
    with Following() as mode:
        low = x.bfloat16()
        out = F.dropout(low, 0.3)
        fused, mask = torch.native_dropout(low, 0.3, True)
    torch.testing.assert_close(mode.shadow.of(out), torch.where(out != 0, x / 0.7, 0.0), **CLOSE)
    torch.testing.assert_close(mode.shadow.of(fused), torch.where(mask, x / 0.7, 0.0), **CLOSE)


def test_a_random_result_is_taken() -> None:
    with Following() as mode:
        low = (torch.ones(4) / 3).bfloat16()
        drawn = torch.bernoulli(low)
        low.normal_()
    assert mode.of("bernoulli") == [None]
    assert torch.equal(mode.shadow.of(drawn), drawn.float())  # type: ignore[arg-type]
    assert torch.equal(mode.shadow.of(low), low.float())  # type: ignore[arg-type]


def test_an_op_that_refuses_float32_has_its_real_result_taken() -> None:
    with Following() as mode:
        low = (torch.rand(16, 16) / 3).to(torch.float8_e4m3fn)
        one = torch.ones(())
        out = torch._scaled_mm(low, low.t(), one, one, out_dtype=torch.bfloat16)
        after = out + 1
    assert mode.of("_scaled_mm") == [None]
    assert torch.equal(mode.shadow.of(after), out.float() + 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_attention_is_written_out_where_its_kernel_refuses_float32(causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3))
    grad = torch.randn(2, 3, 5, 8)
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    gradients = torch.autograd.grad(wanted, (query, key, value), grad)
    arguments: dict[str, Any] = {"query": query, "key": key, "value": value, "is_causal": causal, "dropout_p": 0.0}
    forward = torch.ops.aten._scaled_dot_product_flash_attention.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    with torch.no_grad():
        out = attention_for(forward, arguments)
        back = attention_for(backward, {**arguments, "grad_out": grad})
        dropped = attention_for(backward, {**arguments, "grad_out": grad, "dropout_p": 0.1})
        other = attention_for(torch.ops.aten.mm.default, arguments)
    torch.testing.assert_close(out, [wanted.detach()], **CLOSE)
    torch.testing.assert_close(back, [*gradients], **CLOSE)
    assert dropped is other is None


def test_a_shadow_lives_as_long_as_its_storage() -> None:
    with Following() as mode:
        low = torch.randn(64).bfloat16()
        view, other = low[3:], torch.randn(32).bfloat16()
        assert (mode.shadow.storages, mode.shadow.nbytes) == (2, 4 * 96)
        del low
        assert mode.shadow.storages == 2
        del view
        assert mode.shadow.storages == 1
    del other
    assert mode.shadow.storages == 0


def test_nothing_that_the_real_run_frees_is_kept() -> None:
    gc.collect()
    gc.disable()  # what is freed is freed by itself
    try:
        with Following() as mode:
            weight = torch.randn(8, 8, requires_grad=True)
            loss = (torch.randn(8, 8).bfloat16() @ weight.bfloat16()).relu().square().sum()
            loss.backward()
        del loss
        assert weight.grad is not None
        assert mode.shadow.storages == 1
        weight.grad = None
        assert mode.shadow.storages == 0
    finally:
        gc.enable()


def test_bits_read_as_integers_and_written_back_are_the_real_ones() -> None:
    with Following() as mode:
        low = (torch.ones(4) / 3).bfloat16()
        low.view(torch.int16).add_(1)
        out = low * 1
    assert torch.equal(mode.shadow.of(out), out.float())  # type: ignore[arg-type]


def test_a_resized_storage_loses_its_shadow() -> None:
    with Following() as mode:
        low = (torch.ones(4) / 3).bfloat16()
        low.untyped_storage().resize_(64)
        out = low * 1
    assert torch.equal(mode.shadow.of(out), out.float())  # type: ignore[arg-type]


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("real", "shadow", "error"),
    [
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([3.0, INF], [3.0, 4.0], 0.8),
        ([3.0, NAN], [3.0, 4.0], 0.8),
        ([3.0, 5.0], [3.0, -INF], 0.0),
        ([-INF, 4.0], [-INF, 5.0], 0.2),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1e-30, 0.0], [0.0, 0.0], 1.0),
        ([0.0, 0.0], [1e-30, 0.0], 1.0),
        ([1.5e-30], [1e-30], 0.5),
        ([1.5e30], [1e30], 0.5),
        ([NAN], [NAN], 0.0),
        ([], [], 0.0),
    ],
)
def test_the_relative_error_is_a_finite_share(real: list[float], shadow: list[float], error: float) -> None:
    # Norms in float32 are good to six digits.
    assert relative_error(torch.tensor(real), torch.tensor(shadow)) == pytest.approx(error, rel=1e-6)


def test_the_relative_error_of_float8_and_complex_numbers() -> None:
    low = torch.tensor([1.0, 0.3]).to(torch.float8_e4m3fn)
    assert relative_error(low, low.float()) == 0.0
    assert relative_error(torch.tensor([3 + 4.5j]), torch.tensor([3 + 4j])) == pytest.approx(0.1)
