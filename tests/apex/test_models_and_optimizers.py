"""What scripts do with models and optimizers: GANs, groups that come later, frozen and tied weights, threads, exceptions."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezzo.apex import amp
from mezzo.apex.parallel import LARC

from .loops import alike, copies, same
from .nets import (
    LEVELS,
    TOLERANCE,
    backward,
    batch,
    close,
    gradients,
    loss_of,
    net,
    plant,
    reference_gradients,
    scale,
    sgd,
    start,
    state_of,
)


def bce(logits: Tensor, label: float) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


# A GAN


def _gan() -> tuple[nn.Module, nn.Module, Any, Any]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    # With it Adam's steps do not turn on the last digit of a gradient near 0.
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.5, 0.999), "eps": 1e-3}
    return (
        generator,
        critic,
        torch.optim.Adam(generator.parameters(), **options),
        torch.optim.Adam(critic.parameters(), **options),
    )


def _gan_step(models: Any, optimizers: Any, step: int, propagate: Callable[[Tensor, Any, int], None]) -> None:
    """As in Apex's example: ``zero_grad`` of the models, two losses for the critic, and a third through it."""
    (generator, critic), (of_generator, of_critic) = models, optimizers
    seeds = torch.Generator().manual_seed(step)
    real, noise = torch.randn(16, 8, generator=seeds), torch.randn(16, 4, generator=seeds)
    critic.zero_grad()
    propagate(bce(critic(real), 1.0), of_critic, 0)
    fake = generator(noise)
    propagate(bce(critic(fake.detach()), 0.0), of_critic, 1)
    of_critic.step()
    generator.zero_grad()
    propagate(bce(critic(fake), 1.0), of_generator, 2)
    of_generator.step()


def _scaled(loss: Tensor, optimizer: Any, loss_id: int) -> None:
    with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
        scaled.backward()


def _plainly(loss: Tensor, _optimizer: Any, _loss_id: int) -> None:
    loss.backward()


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_gan_trains_as_in_float32(level: str) -> None:
    *plain, plain_generator, plain_critic = _gan()
    for step in range(8):
        _gan_step(plain, (plain_generator, plain_critic), step, _plainly)
    *models, of_generator, of_critic = _gan()
    returned = amp.initialize(
        models, [of_generator, of_critic], opt_level=level, num_losses=3, loss_scale="dynamic", verbosity=0
    )
    assert returned[0] is models
    for step in range(8):
        _gan_step(*returned, step, _scaled)
    assert [scale(index) for index in range(3)] == [65536.0] * 3
    wanted = [one.detach() for model in plain for one in model.parameters()]
    found = [one.detach() for optimizer in returned[1] for one in amp.master_params(optimizer)]
    for one, other in zip(found, wanted, strict=True):
        # Eight steps of at most 1e-3 each; a tenth of that way.
        torch.testing.assert_close(one.float(), other, rtol=0.0, atol=8e-4)
    moved = [one.detach() for model in _gan()[:2] for one in model.parameters()]
    assert max(float((one - other).abs().max()) for one, other in zip(moved, wanted, strict=True)) > 3e-3


@pytest.mark.parametrize("loss_id", [0, 1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_in_a_gan_an_overflow_skips_its_optimizer_and_halves_its_scale(level: str, loss_id: int) -> None:
    *models, of_generator, of_critic = _gan()
    optimizers = [of_generator, of_critic]
    amp.initialize(models, optimizers, opt_level=level, num_losses=3, loss_scale="dynamic", verbosity=0)
    _gan_step(models, optimizers, 0, _scaled)
    before = [copies(amp.master_params(each)) for each in optimizers]

    def propagate(loss: Tensor, optimizer: Any, of: int) -> None:
        with amp.scale_loss(loss, optimizer, loss_id=of) as scaled:
            scaled.backward()
            if of == loss_id:
                plant(optimizer)

    _gan_step(models, optimizers, 1, propagate)
    unchanged = [same(seen, copies(amp.master_params(each))) for each, seen in zip(optimizers, before, strict=True)]
    assert unchanged == [loss_id == 2, loss_id != 2]
    assert [scale(of) for of in range(3)] == [32768.0 if of == loss_id else 65536.0 for of in range(3)]
    _gan_step(models, optimizers, 2, _scaled)
    assert [scale(of) for of in range(3)] == [32768.0 if of == loss_id else 65536.0 for of in range(3)]
    after = [copies(amp.master_params(each)) for each in optimizers]
    assert not any(same(*pair) for pair in zip(before, after, strict=True))


# Several of one and one of the other


@pytest.mark.parametrize("level", LEVELS)
def test_several_models_with_one_optimizer_train_as_each_with_its_own(level: str) -> None:
    values = []
    for together in (True, False):
        models = [net(), net()]
        if together:
            optimizers: list[Any] = [torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1)]
        else:
            optimizers = [sgd(model, momentum=0.0) for model in models]
        amp.initialize(models, optimizers, opt_level=level, loss_scale=512.0, verbosity=0)
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(models[0], step) + loss_of(models[1], step + 10)
            with amp.scale_loss(loss, optimizers) as scaled:
                scaled.backward()
            for optimizer in optimizers:
                optimizer.step()
        values.append([one for optimizer in optimizers for one in copies(amp.master_params(optimizer))])
    assert same(*values)


@pytest.mark.parametrize("level", LEVELS)
def test_one_model_with_two_optimizers_trains_as_with_one(level: str) -> None:
    values = []
    for split in (True, False):
        model = net()
        every = list(model.parameters())
        parts = [every[:2], every[2:]] if split else [every]
        optimizers: list[Any] = [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in parts]
        amp.initialize(model, optimizers, opt_level=level, loss_scale=512.0, verbosity=0)
        for step in range(4):
            model.zero_grad()
            with amp.scale_loss(loss_of(model, step), optimizers) as scaled:
                scaled.backward()
            for optimizer in optimizers:
                optimizer.step()
        values.append([one for optimizer in optimizers for one in copies(amp.master_params(optimizer))])
    assert same(*values)


@pytest.mark.parametrize("level", LEVELS)
def test_larc_trains_and_skips(level: str) -> None:
    wanted = net()
    reference = LARC(sgd(wanted, momentum=0.0, weight_decay=0.01))
    model = net()
    made = LARC(sgd(model, momentum=0.0, weight_decay=0.01))
    for step in range(4):
        reference.zero_grad()
        loss_of(wanted, step).backward()
        reference.step()
    model, optimizer = amp.initialize(model, made, opt_level=level, loss_scale="dynamic", verbosity=0)
    assert optimizer is made
    for step in range(4):
        optimizer.zero_grad()
        backward(model, optimizer, step)
        optimizer.step()
    close(copies(amp.master_params(optimizer)), copies(wanted.parameters()), 2e-2 if level == "O3" else 5e-3)
    before = copies(amp.master_params(optimizer))
    backward(model, optimizer, overflow=True)
    optimizer.step()
    assert same(copies(amp.master_params(optimizer)), before)
    assert optimizer.param_groups[0]["weight_decay"] == 0.01
    assert scale() == 32768.0


# Parameters that come, go, are shared or unused


@pytest.mark.parametrize("level", LEVELS)
def test_a_group_that_is_added_later_trains_and_skips(level: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)  # type: ignore[index, operator]
    amp.initialize(model, optimizer, opt_level=level, loss_scale=256.0, verbosity=0)
    backward(model, optimizer)
    optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.01})  # type: ignore[index, operator]
    model.zero_grad()
    backward(model, optimizer)
    wanted = reference_gradients(1)
    close(gradients(optimizer), [*wanted[:2], *wanted[4:]])
    before = copies(amp.master_params(optimizer))
    wide = torch.float16 if level == "O3" else torch.float32
    assert [one.dtype for one in before] == [wide] * 4
    optimizer.step()
    after = copies(amp.master_params(optimizer))
    close(
        [one.float() - other.float() for one, other in zip(before[2:], after[2:], strict=True)],
        [0.01 * one for one in wanted[4:]],
        0.2 if level == "O3" else TOLERANCE,
    )
    backward(model, optimizer, overflow=True)
    optimizer.step()
    assert same(copies(amp.master_params(optimizer)), after)


def test_a_group_of_another_model_that_was_initialized_without_an_optimizer_trains() -> None:
    first, second = net(), net()
    optimizer = sgd(first)
    amp.initialize([first, second], optimizer, opt_level="O2", loss_scale=256.0, verbosity=0)
    optimizer.add_param_group({"params": list(second.parameters())})
    before = copies([second[0].weight, second[3].weight])  # type: ignore[index, list-item]
    with amp.scale_loss(loss_of(first) + loss_of(second), optimizer) as scaled:
        scaled.backward()
    close(gradients(optimizer), reference_gradients(1) * 2)
    optimizer.step()
    assert not torch.equal(before[0], second[0].weight)  # type: ignore[arg-type, index]
    assert not torch.equal(before[1], second[3].weight)  # type: ignore[arg-type, index]


def test_small_gradients_of_a_group_that_is_added_later_are_not_lost() -> None:
    """Below 2**-24, the least number of float16, they are there as long as they are scaled."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=2.0**14, verbosity=0)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    with amp.scale_loss(model(torch.ones(3, 4)).sum() * 1e-8, optimizer) as scaled:
        scaled.backward()
    found = list(amp.master_params(optimizer))[3].grad
    torch.testing.assert_close(found, torch.full((2,), 3e-8), rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_that_is_unfrozen_later_is_unscaled_as_all_others(level: str) -> None:
    """Apex's O2 stepped with its gradient as it was: 1024 times too large."""
    model = net()
    model[0].requires_grad_(False)  # type: ignore[index, operator]
    optimizer = sgd(model, momentum=0.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1024.0, verbosity=0)
    backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert same(copies(model[0].parameters()), [one.to(model[0].weight.dtype) for one in copies(net()[0].parameters())])  # type: ignore[index]
    model[0].requires_grad_(True)  # type: ignore[index, operator]
    before = copies(amp.master_params(optimizer))
    backward(model, optimizer, 2)
    found = gradients(optimizer)
    assert len(found) == 6
    assert max(float(one.abs().max()) for one in found) < 1.0
    optimizer.step()
    for one, old, gradient in zip(amp.master_params(optimizer), before, found, strict=True):
        torch.testing.assert_close(one.detach(), old - 0.1 * gradient, rtol=2e-3, atol=1e-6)
    optimizer.zero_grad()
    model[0].requires_grad_(False)  # type: ignore[index, operator]
    frozen = copies(model[0].parameters())  # type: ignore[index, operator]
    backward(model, optimizer, 3)
    assert len(gradients(optimizer)) == 4
    optimizer.step()
    assert same(copies(model[0].parameters()), frozen)  # type: ignore[index, operator]


class Tied(nn.Module):
    """An embedding whose weight is the last layer's too, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 8)
        self.out = nn.Linear(8, 10)
        self.out.weight = self.embedding.weight
        self.unused = nn.Linear(8, 8)

    def forward(self, index: Tensor) -> Tensor:
        result: Tensor = self.out(self.embedding(index).mean(1))
        return result


INDEX, TARGET = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8]]), torch.tensor([1, 4, 9])


def tied_loss(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(INDEX), TARGET)


@pytest.mark.parametrize("level", LEVELS)
def test_tied_weights_stay_tied_and_unused_ones_stay_as_they_are(level: str) -> None:
    plain = Tied()
    tied_loss(plain).backward()
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1024.0, verbosity=0)
    unused = copies(model.unused.parameters())
    with amp.scale_loss(tied_loss(model), optimizer) as scaled:
        scaled.backward()
    close(gradients(optimizer), [one.grad for one in plain.parameters() if one.grad is not None])
    optimizer.step()
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = tied_loss(model)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    assert model.out.weight is model.embedding.weight
    assert same(copies(model.unused.parameters()), unused)
    assert all(one.grad is None for one in model.unused.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_batch_norm_state_is_float32_where_batch_norms_are(level: str) -> None:
    model, optimizer = start(level, optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4))
    for seed in range(3):
        optimizer.zero_grad()
        backward(model, optimizer, seed)
        optimizer.step()
    norm = model[1]  # type: ignore[index]
    wide = torch.float32
    assert norm.running_mean.dtype is (torch.float16 if level == "O3" else wide)  # type: ignore[union-attr]
    if level != "O3":
        assert {value.dtype for entry in optimizer.state.values() for value in entry.values()} == {wide}
    assert int(norm.num_batches_tracked) == 3  # type: ignore[arg-type, union-attr]


# Overflows


@pytest.mark.parametrize("everywhere", [False, True], ids=["one gradient", "all gradients"])
@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize("level", LEVELS)
def test_a_bad_micro_batch_at_any_place_skips_the_step(level: str, bad: int, everywhere: bool) -> None:
    model, optimizer = start(level, num_losses=2)
    before = state_of(model, optimizer)
    for part in range(4):
        with amp.scale_loss(loss_of(model, part), optimizer, loss_id=part % 2) as scaled:
            scaled.backward()
            if part == bad and everywhere:
                for one in model.parameters():
                    assert one.grad is not None
                    one.grad.fill_(torch.nan)
            elif part == bad:
                plant(optimizer)
    assert [scale(0), scale(1)] == [32768.0 if bad % 2 == of else 65536.0 for of in range(2)]
    optimizer.step()
    assert same(state_of(model, optimizer), before)
    optimizer.zero_grad()
    backward(model, optimizer, 5)
    optimizer.step()
    assert not same(state_of(model, optimizer), before)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_are_zeroed_two_blocks_after_an_overflow_are_stepped_with(level: str) -> None:
    model, optimizer = start(level)
    backward(model, optimizer, 1, overflow=True)
    backward(model, optimizer, 2)
    before = state_of(model, optimizer)
    optimizer.zero_grad()
    backward(model, optimizer, 3)
    optimizer.step()
    assert not same(state_of(model, optimizer), before)


# Exceptions


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["before backward", "after backward"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_run_that_was_interrupted_in_a_block_goes_on_as_before(level: str, where: str, error: type) -> None:
    model, optimizer = start(level)
    backward(model, optimizer, 1)
    loss = loss_of(model, 5)
    with pytest.raises(error), amp.scale_loss(loss, optimizer) as scaled:
        if where == "after backward":
            scaled.backward()
        raise error
    assert not optimizer._amp_stash.params_have_scaled_gradients
    optimizer.zero_grad()
    backward(model, optimizer, 1)
    close(gradients(optimizer), reference_gradients(1))
    before = state_of(model, optimizer)
    optimizer.step()
    assert not same(state_of(model, optimizer), before)
    assert scale() == 65536.0


@pytest.mark.parametrize("level", LEVELS)
def test_after_an_interrupted_backward_pass_gradients_are_those_of_before(level: str) -> None:
    """A hook in the middle of the pass raises, when some gradients have come and some have not."""
    model, optimizer = start(level)
    backward(model, optimizer, 1)
    wanted = [(id(one), one) for one in gradients(optimizer)]
    loss = loss_of(model, 2)

    def fail(_: Tensor) -> None:
        raise KeyboardInterrupt

    handle = next(model[0].parameters()).register_hook(fail)  # type: ignore[index, operator, arg-type]
    with pytest.raises(KeyboardInterrupt), amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    handle.remove()
    assert len(gradients(optimizer)) == len(wanted)
    assert not optimizer._amp_stash.params_have_scaled_gradients
    optimizer.zero_grad()
    backward(model, optimizer, 1)
    close(gradients(optimizer), reference_gradients(1))


# Checkpointed parts, and RNNs


class Checkpointed(nn.Module):
    """Some layers are computed again in the backward pass."""

    def __init__(self, *, again: bool, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.5))
        self.last = nn.Linear(16, 4)
        self.again, self.reentrant = again, reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        hidden = checkpoint(self.middle, hidden, use_reentrant=self.reentrant) if self.again else self.middle(hidden)
        result: Tensor = self.last(hidden)
        return result


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("level", LEVELS)
def test_checkpointed_layers_train_bit_for_bit_as_others(level: str, reentrant: bool) -> None:
    values = []
    for again in (False, True):
        model = Checkpointed(again=again, reentrant=reentrant)
        optimizer = sgd(model)
        amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
        for seed in range(4):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            backward(model, optimizer, seed)
            optimizer.step()
        assert scale() == 65536.0
        values.append(copies(amp.master_params(optimizer)))
    assert same(*values)


class Tagger(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = kind(8, 16, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(self.rnn(inputs)[0][:, -1])
        return result


def skip_where_pytorch_cannot(kind: type, dtype: torch.dtype) -> None:
    """Skip an RNN of oneDNN in a dtype in which ``torch.autocast`` cannot train it on this CPU."""
    model = Tagger(kind)
    try:
        with torch.autocast("cpu", dtype):
            loss = model(torch.randn(12, 5, 8)).float().mean()
        loss.backward()
    except RuntimeError as error:
        pytest.skip(f"torch.autocast cannot train it on this CPU: {str(error)[:60]}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_rnns_train_at_o1(kind: type, dtype: torch.dtype) -> None:
    skip_where_pytorch_cannot(kind, dtype)
    model = Tagger(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    amp.initialize(model, optimizer, opt_level="O1", dtype=dtype, verbosity=0)
    inputs, labels = torch.randn(12, 5, 8, generator=torch.Generator().manual_seed(1)), batch()[1]
    seen: list[torch.dtype] = []
    model.rnn.register_forward_hook(lambda _module, _args, output: seen.append(output[0].dtype))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert set(seen) == {dtype}
    assert losses[-1] < losses[0] - 0.3
    assert {one.dtype for one in model.parameters()} == {torch.float32}


# What is left behind


def _live_tensors() -> int:
    gc.collect()
    return sum(1 for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_fifty_steps_leave_no_tensors_behind(level: str) -> None:
    model, optimizer = start(level)

    def some(first: int) -> int:
        for seed in range(first, first + 25):
            optimizer.zero_grad()
            backward(model, optimizer, seed, overflow=seed % 7 == 0)
            optimizer.step()
            with torch.no_grad():
                model(batch(seed)[0])
        return _live_tensors()

    assert some(0) == some(25)


@pytest.mark.parametrize("level", LEVELS)
def test_models_and_optimizers_are_freed(level: str) -> None:
    model, optimizer = start(level)
    for seed in range(2):
        optimizer.zero_grad()
        backward(model, optimizer, seed, overflow=seed == 1)
        optimizer.step()
    seen = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(next(model.parameters()))]
    seen += [weakref.ref(one) for one in amp.master_params(optimizer)]
    del model, optimizer
    gc.collect()
    assert [one() for one in seen] == [None] * len(seen)


def _hooks(model: nn.Module) -> dict[str, int]:
    return {
        f"{path}.{name}": len(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name.endswith("hooks") and isinstance(value, dict)
    }


def test_a_second_initialize_stacks_no_hooks() -> None:
    from torch.optim import optimizer as torch_optimizer

    model, _ = start("O1")
    hooks = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    before, everywhere = _hooks(model), [len(each) for each in hooks]
    second = sgd(model)
    for _ in range(2):
        second = sgd(model)
        amp.initialize(model, second, opt_level="O1", loss_scale="dynamic", verbosity=0)
    assert _hooks(model) == before
    assert [len(each) for each in hooks] == everywhere
    backward(model, second)
    close(gradients(second), reference_gradients(1))
    with amp.disable_casts():
        assert model[0](batch()[0]).dtype is torch.float32  # type: ignore[index, operator]


# Threads


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_threads_train_their_own_models_at_a_time(level: str) -> None:
    """Options, scalers and casts are the process's: each thread takes a ``loss_id`` of its own."""
    steps = 15

    def alone(which: int) -> list[Tensor]:
        model = net()
        optimizer = sgd(model)
        amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
        loop(model, optimizer, which, 0)
        return copies(amp.master_params(optimizer))

    def loop(model: nn.Module, optimizer: Any, which: int, loss_id: int) -> set[torch.dtype]:
        seen = set()
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, 100 * which + step)
            # The region of O1 is open in this thread from the first call of the model on.
            seen.add((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
            with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
                scaled.backward()
                if step == 5 and which == 1:
                    plant(optimizer)
            optimizer.step()
        return seen

    wanted = [alone(which) for which in range(2)]
    models = [net(), net()]
    optimizers = [sgd(model) for model in models]
    amp.initialize(models, optimizers, opt_level=level, loss_scale="dynamic", num_losses=2, verbosity=0)
    ready = threading.Barrier(2)

    def run(which: int) -> set[torch.dtype]:
        ready.wait()
        return loop(models[which], optimizers[which], which, which)

    with ThreadPoolExecutor(2) as pool:
        seen = list(pool.map(run, range(2)))
    assert seen == [{torch.float16 if level == "O1" else torch.float32}] * 2
    assert [scale(index) for index in range(2)] == [65536.0, 32768.0]
    assert alike([copies(amp.master_params(each)) for each in optimizers], wanted)
