"""What the Python kernels of gradient scaling refuse: what PyTorch's refuse, in its words and more, before a write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mezzo.errors import DeviceError, DtypeError
from mezzo.torch import scaling_kernels
from mezzo.torch.scaling_kernels import non_finite_check_and_unscale_, update_scale_

from .kernel_pairs import UNSCALES, float32, int32

INF = float("inf")
EXPANDED = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
    "Please clone() the tensor before performing the operation. A gradient of shape (3,) has the strides (0,)."
)
UNKNOWN = (
    '"_amp_foreach_non_finite_check_and_unscale_" not implemented for {}. It takes gradients in float16, bfloat16, float32 '
    "and float64; pass a complex one as torch.view_as_real(gradient), another as a copy in float32."
)


def good() -> Tensor:
    return torch.tensor([8.0, INF])


# What is wrong; gradients, flag, factor; error; text after PyTorch's.
BAD_UNSCALES: dict[str, tuple[Callable[[], tuple[list[Tensor], Tensor, Tensor]], type[Exception], str]] = {
    "flag of two": (
        lambda: ([good()], torch.zeros(2), float32(0.5)),
        RuntimeError,
        "found_inf must be a 1-element tensor. Its shape is (2,); pass one of shape ().",
    ),
    "flag of none": (
        lambda: ([good()], torch.zeros(0), float32(0.5)),
        RuntimeError,
        "found_inf must be a 1-element tensor. Its shape is (0,); pass one of shape ().",
    ),
    "factor of two": (
        lambda: ([good()], torch.zeros(()), torch.ones(2)),
        RuntimeError,
        "inv_scale must be a 1-element tensor. Its shape is (2,); pass one of shape ().",
    ),
    "flag in float64": (
        lambda: ([good()], torch.zeros((), dtype=torch.float64), float32(0.5)),
        DtypeError,
        "found_inf must be a float tensor. It is torch.float64; convert it with found_inf.to(torch.float32).",
    ),
    "factor in float16": (
        lambda: ([good()], torch.zeros(()), torch.ones((), dtype=torch.float16)),
        DtypeError,
        "inv_scale must be a float tensor. It is torch.float16; convert it with inv_scale.to(torch.float32).",
    ),
    "several at once": (
        lambda: ([good().int()], torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float16)),
        RuntimeError,
        "inv_scale must be a 1-element tensor. Its shape is (2,); pass one of shape ().",
    ),
    "expanded": (
        lambda: ([good(), torch.ones(1).expand(3)], torch.zeros(()), float32(0.5)),
        RuntimeError,
        EXPANDED,
    ),
}
for _dtype in (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn):
    BAD_UNSCALES[str(_dtype)] = (
        lambda dtype=_dtype: ([good(), torch.ones(2).to(dtype)], torch.zeros(()), float32(0.5)),
        NotImplementedError,
        UNKNOWN.format(_dtype),
    )


@pytest.mark.parametrize("name", BAD_UNSCALES)
def test_what_pytorchs_kernel_refuses_is_refused_before_anything_is_written(name):
    make, error, text = BAD_UNSCALES[name]
    scaled, found, factor = make()
    before = [each.clone() for each in (*scaled, found, factor)]
    with pytest.raises(error) as caught:
        non_finite_check_and_unscale_(scaled, found, factor)
    assert str(caught.value) == text
    for now, then in zip((*scaled, found, factor), before, strict=True):
        assert torch.equal(now, then)

    with pytest.raises(RuntimeError) as theirs:
        torch._amp_foreach_non_finite_check_and_unscale_(*make())
    assert isinstance(caught.value, type(theirs.value))
    if error is not NotImplementedError:
        assert text.startswith(str(theirs.value).splitlines()[0])


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_a_sparse_gradient_is_refused(layout):
    scaled = getattr(torch.eye(2), layout)()
    with pytest.raises(
        RuntimeError, match=r"^one of scaled_grads was not a strided tensor\. Its layout is torch\.sparse_"
    ):
        non_finite_check_and_unscale_([scaled], torch.zeros(()), float32(0.5))
    with pytest.raises(RuntimeError):
        torch._amp_foreach_non_finite_check_and_unscale_([scaled], torch.zeros(()), float32(0.5))


@pytest.mark.parametrize("place", ["gradient", "found_inf", "inv_scale"])
def test_tensors_on_two_devices_are_refused_before_anything_is_written(place):
    first, found, factor = good(), torch.zeros(()), float32(0.5)
    scaled = [first, torch.ones(2, device="meta" if place == "gradient" else "cpu")]
    if place == "found_inf":
        found = found.to("meta")
    if place == "inv_scale":
        factor = factor.to("meta")
    with pytest.raises(DeviceError) as caught:
        non_finite_check_and_unscale_(scaled, found, factor)
    texts = {
        "gradient": "one of scaled_grads was not a CPU tensor. It is on meta, others are on cpu; call the op once for each "
        "device, with found_inf and inv_scale on that device.",
        "found_inf": "found_inf must be a CPU tensor. It is on meta, others are on cpu; move it there with "
        "found_inf.to('cpu').",
        "inv_scale": "inv_scale must be a CPU tensor. It is on meta, others are on cpu; move it there with "
        "inv_scale.to('cpu').",
    }
    assert str(caught.value) == texts[place]
    assert first.tolist() == [8.0, INF]
    assert place == "found_inf" or found == 0


def test_without_gradients_nothing_is_done_and_nothing_checked():
    for unscale in UNSCALES.values():
        found = torch.full((2,), 3.0, dtype=torch.float64)
        unscale([], found, torch.ones(3))
        assert found.tolist() == [3.0, 3.0]


# Scale, tracker, flag; error; text after PyTorch's.
BAD_UPDATES: dict[str, tuple[Callable[[], tuple[Tensor, Tensor, Tensor]], type[Exception], str]] = {
    "scale of two": (
        lambda: (torch.ones(2), int32(1), float32(1)),
        RuntimeError,
        "current_scale must be a 1-element tensor. Its shape is (2,); pass one of shape ().",
    ),
    "tracker of none": (
        lambda: (float32(8), torch.zeros(0, dtype=torch.int32), float32(1)),
        RuntimeError,
        "growth_tracker must be a 1-element tensor. Its shape is (0,); pass one of shape ().",
    ),
    "flag of two": (
        lambda: (float32(8), int32(1), torch.ones(2)),
        RuntimeError,
        "found_inf must be a 1-element tensor. Its shape is (2,); pass one of shape ().",
    ),
    "scale in float64": (
        lambda: (torch.tensor(8.0, dtype=torch.float64), int32(1), float32(1)),
        DtypeError,
        "current_scale must be a float tensor. It is torch.float64; convert it with current_scale.to(torch.float32).",
    ),
    "tracker in int64": (
        lambda: (float32(8), torch.tensor(1), float32(1)),
        DtypeError,
        "growth_tracker must be an int tensor. It is torch.int64; convert it with growth_tracker.to(torch.int32).",
    ),
    "flag in bool": (
        lambda: (float32(8), int32(1), torch.tensor(True)),
        DtypeError,
        "found_inf must be a float tensor. It is torch.bool; convert it with found_inf.to(torch.float32).",
    ),
    "several at once": (
        lambda: (torch.ones(2, dtype=torch.float64), torch.tensor(1), torch.ones(3)),
        RuntimeError,
        "current_scale must be a 1-element tensor. Its shape is (2,); pass one of shape ().",
    ),
}


@pytest.mark.parametrize("name", BAD_UPDATES)
def test_an_update_that_pytorchs_kernel_refuses_is_refused_before_anything_is_written(name):
    make, error, text = BAD_UPDATES[name]
    tensors = make()
    with pytest.raises(error) as caught:
        update_scale_(*tensors, 2.0, 0.5, 2)
    assert str(caught.value) == text
    assert all(torch.equal(now, then) for now, then in zip(tensors, make(), strict=True))
    with pytest.raises(RuntimeError) as theirs:
        torch._amp_update_scale_(*make(), 2.0, 0.5, 2)
    assert text.startswith(str(theirs.value).splitlines()[0])


@pytest.mark.parametrize("place", range(3))
def test_an_update_of_tensors_on_two_devices_is_refused(place):
    tensors = [float32(8), int32(1), float32(1)]
    tensors[place] = tensors[place].to("meta")
    with pytest.raises(DeviceError, match=r" must be a (CPU|META) tensor\. It is on (cpu|meta), others are on "):
        update_scale_(*tensors, 2.0, 0.5, 2)
    assert all(now.device.type == "meta" or now.item() == was for now, was in zip(tensors, (8, 1, 1), strict=True))


def test_a_device_without_an_index_is_the_same_as_one_with_an_index():
    assert scaling_kernels._is_on(float32(1), torch.device("cpu", 0))
    assert scaling_kernels._is_on(float32(1), torch.device("cpu"))
    assert not scaling_kernels._is_on(float32(1), torch.device("meta"))
