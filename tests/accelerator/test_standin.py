"""The stand-in accelerator itself: what the other tests rely on when they take it for a device."""

from __future__ import annotations

import gc
import io
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .runs import D, same

REFUSES_TWO_DEVICES = (
    r"Expected all tensors to be on the same device, but found at least two devices, standin:0 and cpu!"
)

FACTORIES: dict[str, Callable[[str], Tensor]] = {
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones": lambda d: torch.ones(2, 3, device=d, dtype=torch.bfloat16),
    "full": lambda d: torch.full((2,), 3.5, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 4, device=d),
    "eye": lambda d: torch.eye(3, device=d),
    "tensor": lambda d: torch.tensor([[1.0, 2.0]], device=d),
    "scalar tensor": lambda d: torch.tensor(3, device=d),
    "as_tensor": lambda d: torch.as_tensor([1.5, 2], device=d),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(3, device=d)),
    "full_like": lambda d: torch.full_like(torch.ones(3, device=d), 2.0, dtype=torch.float16),
    "new_zeros": lambda d: torch.ones(3, device=d).new_zeros(2, 2),
    "new_tensor": lambda d: torch.ones(3, device=d).new_tensor([1, 2]),
    "rand": lambda d: torch.rand(7, device=d),
    "randn": lambda d: torch.randn(7, device=d),
    "randint": lambda d: torch.randint(0, 9, (7,), device=d),
    "randperm": lambda d: torch.randperm(7, device=d),
    "rand_like": lambda d: torch.rand_like(torch.ones(7, device=d)),
    "bernoulli_": lambda d: torch.empty(9, device=d).bernoulli_(0.5),
}


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_factories_make_what_they_make_on_the_cpu(make: Callable[[str], Tensor]) -> None:
    torch.manual_seed(0)
    there = make(D)
    torch.manual_seed(0)
    assert same(there, make("cpu"))


@pytest.mark.parametrize("make", [torch.empty, torch.rand], ids=["empty", "rand"])
def test_tensors_have_the_device_shape_and_dtype_asked_for(make: Callable[..., Tensor]) -> None:
    made = make(2, 3, device=D, dtype=torch.float16)
    assert (made.device, made.shape, made.dtype) == (torch.device("standin:0"), (2, 3), torch.float16)
    assert made.to("meta").device.type == "meta"
    assert torch.empty_like(made).device == made.device


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_go_both_ways(non_blocking: bool) -> None:
    here = torch.randn(4, 5)
    there = here.to(D, non_blocking=non_blocking)
    assert same(there, here)
    assert same(here.to(D, torch.bfloat16), here.to(torch.bfloat16))
    assert torch.equal(there.to("cpu", torch.float16, non_blocking=non_blocking), here.half())
    back = torch.empty(4, 5)
    assert back.copy_(there, non_blocking) is back
    assert torch.equal(back, here)
    assert same(torch.zeros(5, device=D).copy_(here[0]), here[0])
    assert same(torch.zeros(5, device=D, dtype=torch.float16).copy_(there[0]), here[0].half())
    assert same(here.t().to(D), here.t())
    assert there.to(D) is there


def test_a_copy_does_not_share_memory() -> None:
    here = torch.ones(3)
    there = here.to(D)
    there.cpu().zero_()
    here.zero_()
    assert there.tolist() == [1.0, 1.0, 1.0]


def test_numbers_can_be_read_and_printed() -> None:
    one = torch.tensor(2.5, device=D)
    assert one.item() == 2.5
    assert bool(one > 2)
    assert f"{one:.2f}" == "2.50"
    assert torch.ones(2, device=D).tolist() == [1.0, 1.0]
    assert repr(torch.ones(2, device=D)) == "tensor([1., 1.], device='standin:0')"
    assert str(one.to(torch.bfloat16)) == "tensor(2.5000, dtype=torch.bfloat16, device='standin:0')"
    with pytest.raises(RuntimeError, match=r"\.numpy\(\) is not supported"):
        one.numpy()


class TestViewsAndInPlace:
    def test_views_share_memory(self) -> None:
        def work(base: Tensor) -> Tensor:
            base[1].fill_(3)
            base.t()[0].add_(1)
            base.view(2, 8)[1, ::2] = 7
            base.unbind(1)[2].mul_(2)
            base.detach()[0, 0] = 9
            return base

        base = torch.zeros(4, 4, device=D)
        row, flat = base[2], base.view(-1)
        assert same(work(base), work(torch.zeros(4, 4)))
        assert (row.tolist(), flat[8:12].tolist()) == (base[2].tolist(), base[2].tolist())
        assert row._base is base
        base.data.zero_()
        assert row.tolist() == [0.0] * 4

    def test_in_place_keeps_the_object_and_counts_versions(self) -> None:
        tensor = torch.ones(4, device=D)
        view = tensor[:2]
        assert tensor.add_(1) is tensor
        view.mul_(3)
        assert (tensor._version, view._version) == (2, 2)
        torch._foreach_add_([tensor], 1.0)  # without the count, mezzo would take an optimizer's step for none
        assert tensor._version == 3
        assert tensor.tolist() == [7.0, 7.0, 3.0, 3.0]

    def test_a_changed_saved_tensor_is_noticed(self) -> None:
        x = torch.ones(3, device=D, requires_grad=True)
        y = x.exp()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    def test_out_is_the_object_given_and_resized(self) -> None:
        a = torch.randn(3, 4)
        out, full = torch.empty(0, device=D), torch.empty(3, 3, device=D)
        assert torch.mm(a.to(D), a.t().to(D), out=out) is out
        assert torch.mm(a.to(D), a.t().to(D), out=full) is full
        assert same(out, a @ a.t())
        assert same(full, a @ a.t())
        assert full._version == 1

    def test_layout_changes_in_place(self) -> None:
        x = torch.randn(3, 4)
        there = x.to(D)
        assert there.t_() is there
        assert same(there, x.t())
        assert there.stride() == (1, 4)
        assert there.unsqueeze_(0).shape == (1, 4, 3)
        assert there.resize_(5, 5).fill_(1).sum().item() == 25
        other = torch.empty(0, device=D)
        assert other.set_(there) is other
        there.zero_()
        assert (other.shape, other.sum().item()) == ((5, 5), 0.0)

    def test_assigning_data_changes_memory_and_dtype(self) -> None:
        x, y = torch.zeros(2, device=D), torch.ones(3, device=D, dtype=torch.float16)
        x.data = y
        assert same(x, torch.ones(3, dtype=torch.float16))
        y.add_(1)
        assert x.tolist() == [2.0, 2.0, 2.0]

    def test_memory_ends_with_its_last_tensor(self) -> None:
        base = torch.zeros(4, device=D)
        memory = weakref.ref(base.untyped_storage().memory)
        view = base[1:]
        del base
        gc.collect()
        assert memory() is not None
        del view
        gc.collect()
        assert memory() is None


class TestAutograd:
    def test_gradients_equal_the_cpu_s_through_views_and_in_place(self) -> None:
        def gradient(start: Tensor) -> Tensor:
            w = start.clone().requires_grad_()
            y = w * 2
            y[0].mul_(3)
            y.t()[1] += 1
            y.view(-1)[::5].sigmoid_()
            (y * y).sum().backward()
            assert w.grad is not None
            return w.grad

        start = torch.randn(4, 4)
        assert same(gradient(start.to(D)), gradient(start))

    def test_a_backward_pass_runs_in_a_thread_of_the_engine(self) -> None:
        threads: list[int] = []

        class Here(torch.autograd.Function):
            @staticmethod
            def forward(*args: Any) -> Tensor:
                return args[1] * 2

            @staticmethod
            def backward(*args: Any) -> Tensor:
                threads.append(threading.get_ident())
                return args[1] * 2

        x = torch.ones(2, device=D, requires_grad=True)
        for _ in range(3):
            Here.apply(x).sum().backward()
        assert x.grad.tolist() == [6.0, 6.0]
        assert threading.get_ident() not in threads
        assert len(threads) == 3

    def test_backward_passes_of_several_threads(self) -> None:
        got: dict[int, list[float]] = {}

        def work(number: int) -> None:
            x = torch.full((2,), float(number), device=D, requires_grad=True)
            for _ in range(20):
                x.grad = None
                (x * x).sum().backward()
            got[number] = x.grad.tolist()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {number: [2.0 * number] * 2 for number in range(4)}

    def test_an_error_in_a_backward_pass_reaches_the_caller(self) -> None:
        # An exception in a tensor's hook is another matter: PyTorch 2.13 ends the process if the device is one in Python.
        class Broken(torch.autograd.Function):
            @staticmethod
            def forward(*args: Any) -> Tensor:
                return args[1] * 2

            @staticmethod
            def backward(*_: Any) -> Tensor:
                msg = "broken on purpose"
                raise ZeroDivisionError(msg)

        x = torch.ones(2, device=D, requires_grad=True)
        with pytest.raises(ZeroDivisionError, match="broken on purpose"):
            Broken.apply(x).sum().backward()
        x.sum().backward()
        assert x.grad.tolist() == [1.0, 1.0]

    def test_double_backward_and_inference_mode(self) -> None:
        x = torch.tensor([2.0], device=D, requires_grad=True)
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert (first.item(), second.item()) == (12.0, 12.0)
        net = nn.Linear(2, 2, device=D)
        with torch.inference_mode():
            y = net(torch.ones(1, 2, device=D))
            assert y.is_inference()
            assert y.to("cpu").device.type == "cpu"
            y[0].fill_(2)
            assert y.tolist() == [[2.0, 2.0]]


class TestTwoDevices:
    @pytest.mark.parametrize(
        "op",
        [
            lambda here, there: there + here,
            lambda here, there: here + there,
            lambda here, there: torch.mm(there, here),
            lambda here, there: F.linear(here, weight=there),
            lambda here, there: torch.cat([there, here]),
            lambda here, there: here.add_(there),
            lambda here, there: here.sum().add_(there.sum()),
            lambda here, there: here * there.sum(),
            lambda here, there: torch.add(there, there, out=here),
            lambda here, there: F.mse_loss(there, here),
            lambda here, there: torch._foreach_add([there], [here]),
        ],
    )
    def test_ops_on_both_are_refused(self, op: Callable[[Tensor, Tensor], Any]) -> None:
        with pytest.raises(RuntimeError, match=REFUSES_TWO_DEVICES):
            op(torch.ones(3, 3), torch.ones(3, 3, device=D))

    def test_nothing_is_written_by_a_refused_op(self) -> None:
        here = torch.ones(3)
        with pytest.raises(RuntimeError, match=REFUSES_TWO_DEVICES):
            here.add_(torch.ones(3, device=D))
        assert here.tolist() == [1.0, 1.0, 1.0]

    def test_cpu_tensors_without_dimensions_and_indices_may_come_along(self) -> None:
        x, two = torch.ones(3, device=D), torch.tensor(2.0)
        assert (x * two).tolist() == (two * x).tolist() == [2.0, 2.0, 2.0]
        assert x[torch.tensor([0, 2])].tolist() == [1.0, 1.0]
        x[torch.tensor([0])] = 5.0
        assert x.tolist() == [5.0, 1.0, 1.0]

    def test_what_the_device_does_not_have(self) -> None:
        with pytest.raises(NotImplementedError, match=r"strided real tensors only, not torch\.complex64"):
            torch.zeros(2, dtype=torch.complex64, device=D)
        with pytest.raises(NotImplementedError, match=r"strided real tensors only, not .* in torch\.sparse_coo"):
            torch.ones(2, device=D).to_sparse()
        file = io.BytesIO()
        torch.save(torch.ones(2), file)
        file.seek(0)
        with pytest.raises(NotImplementedError, match="use map_location='cpu'"):
            torch.load(file, map_location=D)


class TestRandomNumbers:
    def test_seeds_and_states(self) -> None:
        torch.manual_seed(1)
        state = torch.standin.get_rng_state()
        first = torch.randn(3, device=D)
        second = torch.randn(3, device=D)
        torch.standin.set_rng_state(state)
        assert torch.equal(torch.randn(3, device=D), first)
        assert not torch.equal(first, second)
        torch.standin.manual_seed_all(1)
        assert torch.equal(torch.randn(3, device=D), first)

    def test_the_device_and_the_cpu_do_not_move_each_other(self) -> None:
        torch.manual_seed(1)
        expected = torch.randn(3)
        torch.manual_seed(1)
        torch.randn(100, device=D)
        assert torch.equal(torch.randn(3), expected)
        torch.manual_seed(1)
        torch.randn(100)
        assert same(torch.randn(3, device=D), expected)

    def test_dropout_and_its_gradient(self) -> None:
        def work(device: str) -> tuple[Tensor, Tensor]:
            torch.manual_seed(0)
            x = torch.ones(100, device=device, requires_grad=True)
            y = F.dropout(x, 0.5)
            y.sum().backward()
            return y.detach(), x.grad

        (y, grad), (y_cpu, grad_cpu) = work(D), work("cpu")
        assert same(y, y_cpu)
        assert same(grad, grad_cpu)
        assert 20 < (y == 0).sum().item() < 80

    def test_fork_rng(self) -> None:
        torch.manual_seed(3)
        with torch.random.fork_rng(device_type=D):
            inside = torch.randn(2, device=D)
        assert torch.equal(torch.randn(2, device=D), inside)
