"""`initialize` as a whole: what comes back, errors that change nothing, dtypes by argument and environment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mezzo.apex import amp
from mezzo.errors import AmpError, AmpOptionError, AmpTypeError

from .nets import LEVELS, backward, gradients, loss_of, net, scale, sgd, start, state_of


@pytest.mark.parametrize("level", [*LEVELS, "off"])
def test_what_comes_is_what_is_returned(level: str) -> None:
    options: dict[str, Any] = {"enabled": False} if level == "off" else {"opt_level": level, "verbosity": 0}

    def fresh() -> tuple[nn.Module, Any]:
        model = net()
        return model, sgd(model)

    model, optimizer = fresh()
    assert amp.initialize(model, **options) is model
    models = [fresh()[0]]
    assert amp.initialize(models, **options) is models
    model, optimizer = fresh()
    assert amp.initialize(model, optimizer, **options) == (model, optimizer)
    model, optimizer = fresh()
    optimizers = [optimizer]
    both = amp.initialize(model, optimizers, **options)
    assert isinstance(both, tuple)
    assert both[0] is model
    assert both[1] is optimizers
    model, optimizer = fresh()
    models = [model]
    assert amp.initialize(models, optimizer, **options) == (models, optimizer)
    model, optimizer = fresh()
    both = amp.initialize(model, [], **options)
    assert both == (model, [])


@pytest.mark.parametrize("level", LEVELS)
def test_all_arguments_may_be_positional(level: str) -> None:
    model = net()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, True, level, None, None, None, None, "64.0", None, 2, 0, None, 2.0**24)
    assert [scale(0), scale(1)] == [64.0, 64.0]


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"opt_level": "00"}, AmpOptionError, "letter O"),
    ({"opt_level": None}, AmpOptionError, "None"),
    ({"opt_level": "o1"}, AmpOptionError, "O1"),
    ({"opt_level": "O1", "cast_model_type": torch.float16}, AmpError, "O1"),
    ({"opt_level": "O2", "patch_torch_functions": True}, AmpError, "O1"),
    ({"opt_level": "O1", "keep_batchnorm_fp32": True}, AmpError, "keep_batchnorm_fp32"),
    ({"opt_level": "O2", "keep_batchnorm_fp32": "None"}, AmpOptionError, "keep_batchnorm_fp32"),
    ({"opt_level": "O1", "master_weights": False}, AmpError, "master_weights"),
    ({"opt_level": "O2", "loss_scale": "Dynamic"}, ValueError, "dynamic"),
    ({"opt_level": "O2", "loss_scale": -1.0}, AmpOptionError, "loss_scale"),
    ({"opt_level": "O2", "loss_scale": float("inf")}, AmpOptionError, "loss_scale"),
    ({"opt_level": "O2", "num_losses": 0}, AmpOptionError, "num_losses is the number of losses, at least 1; got 0"),
    ({"opt_level": "O2", "num_losses": True}, AmpOptionError, "num_losses"),
    ({"opt_level": "O2", "min_loss_scale": -2.0}, AmpOptionError, "min_loss_scale"),
    ({"opt_level": "O2", "dtype": torch.float64}, AmpOptionError, "dtype is torch.float16 or torch.bfloat16"),
    ({"opt_level": "O2", "dtype": torch.float16, "cast_model_type": torch.bfloat16}, AmpOptionError, "contradict"),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG, ids=[str(options) for options, _, _ in WRONG])
def test_a_wrong_option_changes_nothing(options: dict[str, Any], error: type[Exception], text: str) -> None:
    model = net()
    optimizer = sgd(model)
    before, hooks = state_of(model, optimizer), len(model._forward_hooks) + len(model._forward_pre_hooks)
    with pytest.raises(error, match=text):
        amp.initialize(model, optimizer, **options)
    after = state_of(model, optimizer)
    assert [one.dtype for one in after] == [torch.float32] * len(before)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert len(model._forward_hooks) + len(model._forward_pre_hooks) == hooks
    assert "_amp_stash" not in vars(optimizer)
    assert amp._amp_state.opt_properties is None
    assert not torch.is_autocast_enabled("cpu")
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)


@pytest.mark.parametrize("level", LEVELS)
def test_wrong_models_and_optimizers_change_nothing(level: str) -> None:
    model = net()
    optimizer = sgd(model)
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        ((model,), optimizer, AmpTypeError, "tuple"),
        (model, (optimizer,), AmpTypeError, "tuple"),
        ("model", optimizer, AmpTypeError, "str"),
        (model, model.parameters(), AmpTypeError, "generator"),
        (nn.DataParallel(model), optimizer, AmpError, "DataParallel"),
        (model, [optimizer, optimizer], AmpError, "twice"),
    ]
    for models, optimizers, error, text in wrong:
        with pytest.raises(error, match=text):
            amp.initialize(models, optimizers, opt_level=level, verbosity=0)
        assert model[0].weight.dtype is torch.float32
        assert "_amp_stash" not in vars(optimizer)
    half = net().half()
    with pytest.raises(AmpError, match=r"0\.weight.*float16"):
        amp.initialize(half, sgd(half), opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_comes_once(level: str) -> None:
    model, optimizer = start(level)
    with pytest.raises(AmpError, match="once"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    backward(model, optimizer)
    optimizer.step()


def test_another_model_may_come_later_and_has_scalers_of_its_own() -> None:
    start("O1")
    model, optimizer = start("O2", num_losses=2)
    assert not torch.is_autocast_enabled("cpu")
    assert len(amp._amp_state.loss_scalers) == 2
    backward(model, optimizer, loss_id=1)
    optimizer.step()


@pytest.mark.parametrize("how", ["argument", "environment", "cast_model_type"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_bfloat16_needs_no_scaling(level: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "cast_model_type" and level == "O1":
        pytest.skip("O1 casts no model")
    options: dict[str, Any] = {"loss_scale": None}
    if how == "argument":
        options["dtype"] = torch.bfloat16
    elif how == "environment":
        monkeypatch.setenv("MEZZO_APEX_DTYPE", "bfloat16")
    else:
        options["cast_model_type"] = torch.bfloat16
    model, optimizer = start(level, **options)
    assert scale() == 1.0
    inside = []
    model[3].register_forward_hook(lambda _module, _inputs, output: inside.append(output.dtype))
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = loss_of(model)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert set(inside) == {torch.bfloat16}
    assert losses[-1] < 0.8 * losses[0]


def test_a_wrong_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZZO_APEX_DTYPE", "bf16")
    with pytest.raises(AmpOptionError, match="MEZZO_APEX_DTYPE is 'float16' or 'bfloat16', got 'bf16'"):
        start("O1")


def test_the_options_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    start("O2", verbosity=1, loss_scale=128.0)
    lines = capsys.readouterr().out.splitlines()
    assert f"{'loss_scale':22} : 128.0" in lines
    assert f"{'loss_scale':22} : dynamic" in lines
    assert f"{'cast_model_type':22} : torch.float16" in lines
    start("O2", verbosity=0)
    assert capsys.readouterr().out == ""


def test_an_optimizer_without_hooks_is_refused() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": list(parameters), "lr": 0.1}]
            self.state = {}  # type: ignore[assignment]

        def step(self, closure: Any = None) -> None:
            del closure

    model = net()
    for level in LEVELS:
        with pytest.raises(AmpError, match=r"does not call torch.optim.Optimizer.__init__"):
            amp.initialize(model, Plain(model.parameters()), opt_level=level, verbosity=0)
        assert model[0].weight.dtype is torch.float32


def test_enabled_may_be_a_string_of_the_command_line() -> None:
    model = net()
    amp.initialize(model, opt_level="O2", enabled="False", verbosity=0)  # type: ignore[arg-type]
    assert model[0].weight.dtype is torch.float32
    with pytest.raises(AmpOptionError, match="enabled"):
        amp.initialize(model, opt_level="O2", enabled="no", verbosity=0)  # type: ignore[arg-type]
    amp.initialize(model, opt_level="O2", enabled="True", dtype="bfloat16", verbosity=0)  # type: ignore[arg-type]
    assert model[0].weight.dtype is torch.bfloat16


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_of_another_model_is_told(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    amp.initialize(model, [sgd(net()), sgd(model)], opt_level=level)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Warning")]
    assert lines == ["Warning: none of the 6 parameters of this SGD are the models'."]


def test_inference_needs_no_optimizer() -> None:
    for level in LEVELS:
        model = amp.initialize(net().eval(), opt_level=level, verbosity=0)
        with torch.no_grad():
            output = model(torch.ones(2, 8))
        assert output.dtype is (torch.float16 if level == "O1" else torch.float32)


@pytest.mark.parametrize("level", LEVELS)
def test_clipping_through_master_params(level: str) -> None:
    for clip in ("norm", "value"):
        model, optimizer = start(level, loss_scale=256.0)
        backward(model, optimizer)
        if clip == "norm":
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
            norm = torch.stack([one.float().norm() for one in gradients(optimizer)]).norm()
            assert norm.item() == pytest.approx(0.01, rel=1e-2)
        else:
            torch.nn.utils.clip_grad_value_(amp.master_params(optimizer), 1e-3)
            largest = max(one.abs().max().item() for one in gradients(optimizer))
            assert largest == pytest.approx(1e-3, rel=1e-3)
