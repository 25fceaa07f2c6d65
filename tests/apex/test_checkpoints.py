"""Checkpoints: scales in `amp.state_dict()`, exact resumes in every order, and what Apex wrote."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from mezzo.apex import amp
from mezzo.errors import AmpError

from .nets import LEVELS, backward, net, scale, start, state_of

KINDS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
}


def step(model: nn.Module, optimizer: Any, seed: int, *, overflow: bool = False) -> None:
    optimizer.zero_grad()
    backward(model, optimizer, seed, overflow=overflow)
    optimizer.step()


def saved(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Through a file, as scripts do."""
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=False)
    return loaded


ORDERS = ["-".join(order) for order in itertools.permutations(("model", "optimizer", "amp"))]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_run_resumes_exactly_in_any_order(level: str, kind: str, order: str) -> None:
    model, optimizer = start(level, optimizer=KINDS[kind])
    for seed in range(4):
        step(model, optimizer, seed, overflow=seed == 2)
    checkpoint = saved(model, optimizer)
    for seed in range(4, 8):
        step(model, optimizer, seed)
    wanted, wanted_scales = state_of(model, optimizer), amp.state_dict()

    torch.manual_seed(7)
    model, optimizer = start(level, optimizer=KINDS[kind])
    for part in order.split("-"):
        {"model": model, "optimizer": optimizer, "amp": amp}[part].load_state_dict(checkpoint[part])  # type: ignore[attr-defined]
    assert scale() == 32768.0
    for seed in range(4, 8):
        step(model, optimizer, seed)
    for one, other in zip(state_of(model, optimizer), wanted, strict=True):
        assert torch.equal(one, other)
    assert amp.state_dict() == wanted_scales


@pytest.mark.parametrize("kind", KINDS)
def test_o2_keeps_small_moments(kind: str) -> None:
    """Apex's documented order cast Adam's state to float16 first: moments of 2e-12 became 0."""
    model, optimizer = start("O2", optimizer=KINDS[kind])
    step(model, optimizer, 0)
    for entry in optimizer.state.values():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor) and value.dim():
                assert value.dtype is torch.float32, name
                value.fill_(2e-12)
    checkpoint = saved(model, optimizer)
    model, optimizer = start("O2", optimizer=KINDS[kind])
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    moments = [value for entry in optimizer.state.values() for value in entry.values() if value.dim()]
    assert moments
    assert all((value == 2e-12).all() for value in moments)


def test_masters_survive_a_resume() -> None:
    """Apex rounded the weights to float16 at each resume."""
    model, optimizer = start("O2")
    for seed in range(3):
        step(model, optimizer, seed)
    masters = [one.detach().clone() for one in amp.master_params(optimizer)]
    assert any(not torch.equal(one, one.half().float()) for one in masters)
    checkpoint = saved(model, optimizer)
    model, optimizer = start("O2")
    model.load_state_dict(checkpoint["model"])
    for one, other in zip(amp.master_params(optimizer), masters, strict=True):
        assert torch.equal(one, other)


def test_the_state_dict_has_float32_at_each_level_and_goes_anywhere() -> None:
    for source, target in itertools.product(LEVELS, LEVELS):
        model, optimizer = start(source)
        step(model, optimizer, 0)
        found = model.state_dict()
        assert {value.dtype for value in found.values() if value.is_floating_point()} == {torch.float32}, source
        found = {name: value.clone() for name, value in found.items()}
        other, _ = start(target)
        other.load_state_dict(found)
        tolerance = 0.0 if target != "O3" else 2e-3
        for name, value in other.state_dict().items():
            torch.testing.assert_close(value, found[name], rtol=tolerance, atol=tolerance)
        plain = net()
        plain.load_state_dict(found)
        assert torch.equal(plain[0].weight, found["0.weight"])


def test_a_checkpoint_of_apex_with_masters_beside_it() -> None:
    """The idiom of NVIDIA's BERT and its derivatives: masters saved by hand, loaded into `amp.master_params`."""
    model, optimizer = start("O2", optimizer=KINDS["adam"])
    for seed in range(3):
        step(model, optimizer, seed)
    masters = [one.detach().clone() for one in amp.master_params(optimizer)]
    written_by_apex = {
        # Half weights made float32, and no masters in the optimizer's state.
        "model": {
            name: value.half().float() if value.is_floating_point() and not name.startswith("1.") else value.clone()
            for name, value in model.state_dict().items()
        },
        "optimizer": {key: value for key, value in optimizer.state_dict().items() if key in ("state", "param_groups")},
        "master params": masters,
        "amp": {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 3}},
    }
    written_by_apex = copy.deepcopy(written_by_apex)
    for seed in range(3, 6):
        step(model, optimizer, seed)
    wanted = state_of(model, optimizer)

    model, optimizer = start("O2", optimizer=KINDS["adam"])
    model.load_state_dict(written_by_apex["model"])
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(written_by_apex["optimizer"])
    for one, value in zip(amp.master_params(optimizer), written_by_apex["master params"], strict=True):
        one.data.copy_(value.data)
    amp.load_state_dict(written_by_apex["amp"])
    for seed in range(3, 6):
        step(model, optimizer, seed)
    for one, other in zip(state_of(model, optimizer), wanted, strict=True):
        assert torch.equal(one, other)


def test_masters_that_a_script_saves_by_itself_load_in_torch_loads_safe_way() -> None:
    """NVIDIA's BERT has "master params": list(amp.master_params(optimizer)) in its checkpoints."""
    model, optimizer = start("O2")
    step(model, optimizer, 0)
    file = io.BytesIO()
    torch.save({"master params": list(amp.master_params(optimizer))}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["master params"]
    for one, other in zip(loaded, amp.master_params(optimizer), strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()


def test_a_checkpoint_of_apex_without_masters_loads() -> None:
    model, optimizer = start("O2")
    model.load_state_dict({name: value.clone() for name, value in net().state_dict().items()})
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 1999}})
    step(model, optimizer, 0)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 0}}


def test_weights_loaded_after_the_first_step_are_trained() -> None:
    """Apex's masters were stale then: the next step wrote them over the loaded weights."""
    model, optimizer = start("O2", optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-4))
    step(model, optimizer, 0)
    loaded = {name: torch.full_like(value, 0.25) for name, value in net().state_dict().items()}
    model.load_state_dict(loaded)
    step(model, optimizer, 1)
    assert (model[0].weight - 0.25).abs().max() < 1e-2


# Scales


def test_scales_are_loaded_by_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    """Apex took them in the order of the mapping."""
    start("O1", num_losses=2, verbosity=1)
    capsys.readouterr()
    amp.load_state_dict(
        {
            "loss_scaler1": {"loss_scale": 8.0, "unskipped": 1},
            "loss_scaler0": {"loss_scale": 4.0, "unskipped": 0},
        }
    )
    assert (scale(0), scale(1)) == (4.0, 8.0)
    assert capsys.readouterr().out == ""
    amp.load_state_dict({f"loss_scaler{index}": {"loss_scale": 2.0, "unskipped": 0} for index in range(3)})
    assert (scale(0), scale(1)) == (2.0, 2.0)
    printed = capsys.readouterr().out
    assert "got 3 loss scaler(s), and amp.initialize made 2" in printed
    assert "Skipping loss_scaler2" in printed
    amp.load_state_dict({"loss_scaler1": {"loss_scale": 16.0, "unskipped": 0}})
    assert (scale(0), scale(1)) == (2.0, 16.0)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}, "model": {}}, "unexpected keys: 'model'"),
        ({"scaler": 1}, r"pass checkpoint\['amp'\]"),
        ({"loss_scaler0": {"scale": 4.0}}, "An entry is"),
        ({"loss_scaler0": {"loss_scale": 0.0, "unskipped": 0}}, "An entry is"),
        ({"loss_scaler0": 4.0}, "An entry is"),
        ({"loss_scaler0": {"loss_scale": 2.0, "unskipped": -5}}, "not negative"),
        ({"loss_scaler00": {"loss_scale": 2.0, "unskipped": 0}}, "unexpected keys"),
        ([1], "got list"),
    ],
)
def test_a_wrong_checkpoint_changes_no_scale(wrong: Any, text: str) -> None:
    start("O1")
    with pytest.raises(AmpError, match=text):
        amp.load_state_dict(wrong)
    assert scale() == 65536.0


def test_before_initialize_there_are_no_scales() -> None:
    with pytest.raises(AmpError, match=r"amp\.state_dict was called before amp\.initialize"):
        amp.state_dict()
    with pytest.raises(AmpError, match=r"amp\.load_state_dict was called before amp\.initialize"):
        amp.load_state_dict({})


def test_a_mapping_may_be_given_to_write_to() -> None:
    start("O1", loss_scale=8.0)
    given: dict[str, Any] = {"epoch": 3}
    assert amp.state_dict(given) is given
    assert given == {"epoch": 3, "loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}}
