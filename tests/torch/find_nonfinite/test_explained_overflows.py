"""``GradScaler(on_overflow="explain")``: the iteration after a skipped step is watched, and the op is named."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from torch import Tensor, nn

from mezzo.errors import ScalingError
from mezzo.torch import GradScaler, autocast, explain


class Hot(nn.Module):
    """Overflows float16 by a factor, from the first step on."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor / self.factor


def model_with(factor: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Hot(factor), nn.Linear(4, 1))


def iteration(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> bool:
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        loss = model(torch.ones(2, 4)).float().square().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.stepped(optimizer)


def modes() -> int:
    return torch._C._len_torch_dispatch_stack()


def test_a_step_that_overflows_again_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    model = model_with(1e6)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), GradScaler("cpu", 4.0, on_overflow="explain")
    assert scaler.explanation is None
    with caplog.at_level(logging.WARNING, "mezzo.torch.scaler"):
        assert not iteration(model, optimizer, scaler)
        assert (modes(), scaler.explanation) == (1, None)
        assert not iteration(model, optimizer, scaler)
    assert modes() == 0
    assert scaler.explanation is not None
    first = scaler.explanation.first
    assert first is not None
    assert (first.op, first.path, first.phase, first.kind) == ("aten::mul", ("1",), "forward", "Inf")
    assert "a step was skipped at scale 2, number 2 in a row." in caplog.text
    assert "first appears in mul of 1, forward pass" in caplog.text
    assert "gradients: 0.weight: 16 NaN" in caplog.text


def test_the_same_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = model_with(1e6)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), GradScaler("cpu", 64.0, on_overflow="explain")
    with caplog.at_level(logging.WARNING, "mezzo.torch.scaler"):
        for _ in range(6):
            iteration(model, optimizer, scaler)
    assert caplog.text.count("first appears in") == 1


def test_a_scale_that_was_too_high_needs_no_explanation(caplog: pytest.LogCaptureFixture) -> None:
    model = model_with(1.0)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.0), GradScaler("cpu", on_overflow="explain")
    gradients = torch.autograd.grad(model(torch.ones(2, 4)).square().sum(), list(model.parameters()))
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    scaler = GradScaler("cpu", 2.0 ** int(torch.tensor(65504 / largest).log2() + 1), on_overflow="explain")
    made = [iteration(model, optimizer, scaler) for _ in range(4)]
    assert not made[0]
    assert made[-1]
    assert modes() == 0


def test_nothing_is_watched_while_all_goes_well() -> None:
    model = model_with(1.0)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), GradScaler("cpu", 1.0, on_overflow="explain")
    for _ in range(3):
        assert iteration(model, optimizer, scaler)
        assert modes() == 0
    assert scaler.explanation is None


def test_the_next_skip_after_an_explanation_is_watched_again() -> None:
    model = model_with(1e6)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), GradScaler("cpu", 4.0, on_overflow="explain")
    seen = []
    for _ in range(4):
        iteration(model, optimizer, scaler)
        seen.append(modes())
    assert seen == [1, 0, 1, 0]


def test_what_a_watched_iteration_showed_explains_no_later_one() -> None:
    model = model_with(1.0)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), GradScaler("cpu", 4.0, on_overflow="explain")
    made, watched = [], []
    for broken in (True, False, True, False):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).square().sum()).backward()
        if broken:
            for gradient in (parameter.grad for parameter in model.parameters()):
                assert gradient is not None
                gradient[0] = torch.inf  # in an iteration that is watched it would be seen; this one is not
        else:
            torch.zeros(1).log()  # a number that is printed, say; the step is made
        watched.append(modes())
        scaler.step(optimizer)
        scaler.update()
        made.append(scaler.stepped(optimizer))
    assert (made, watched) == ([False, True, False, True], [0, 1, 0, 1])
    assert scaler.explanation is None


def test_a_block_of_the_users_own_is_not_disturbed() -> None:
    model = model_with(1e6)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), GradScaler("cpu", 4.0, on_overflow="explain")
    iteration(model, optimizer, scaler)
    with explain(model) as explained:
        iteration(model, optimizer, scaler)
    assert explained.report.records
    assert torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python) is False
    iteration(model, optimizer, scaler)
    iteration(model, optimizer, scaler)
    for _ in range(2):
        if modes():
            iteration(model, optimizer, scaler)
    assert modes() == 0


def test_two_optimizers_share_the_watch() -> None:
    good, bad = model_with(1.0), model_with(1e6)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (good, bad)]
    scaler = GradScaler("cpu", 4.0, on_overflow="explain")
    for _ in range(2):
        for model, optimizer in zip((good, bad), optimizers, strict=True):
            optimizer.zero_grad()
            with autocast("cpu", dtype=torch.float16):
                loss = model(torch.ones(2, 4)).float().square().sum()
            scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.explanation is not None
    assert modes() == 0


def test_copies_have_heard_of_nothing() -> None:
    scaler = GradScaler("cpu", 4.0, on_overflow="explain")
    for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert twin.explanation is None
        assert twin._on_overflow is not scaler._on_overflow


def test_other_words_are_refused() -> None:
    with pytest.raises(ScalingError, match="on_overflow must be a function of one argument, an Overflow, or 'explain'"):
        GradScaler("cpu", on_overflow="loudly")  # type: ignore[arg-type]
