"""What `prepare` and `unprepare` refuse, in which words, and that nothing has changed then."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo.torch
from mezzo.errors import MezzoError, PreparationError
from mezzo.torch import prepare, unprepare

from .refusals import check_refused, trained
from .runs import LOW, SETTINGS, differing, net, run, same, snapshot, train

Optimizer = torch.optim.Optimizer


def test_the_snapshot_sees_every_kind_of_change() -> None:
    changes: list[Callable[[nn.Sequential, Optimizer], Any]] = [
        lambda model, _: model[0].weight.data.zero_(),
        lambda model, _: model[0].register_forward_pre_hook(lambda *_: None),
        lambda model, _: model[3].register_load_state_dict_pre_hook(lambda *_: None),
        lambda model, _: setattr(model[0].weight, "grad", model[0].weight.grad.clone()),
        lambda model, _: setattr(model[0].weight, "data", model[0].weight.data.clone()),
        lambda model, _: setattr(model[0], "note", 1),
        lambda model, _: model[0].weight.register_hook(lambda _: None),
        lambda model, _: model[1].requires_grad_(False),
        lambda model, _: model.scale.fill_(2.0),
        lambda _, optimizer: optimizer.register_state_dict_post_hook(lambda *_: None),
        lambda _, optimizer: optimizer.param_groups[0].update(lr=0.2),
        lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        lambda _, optimizer: next(iter(optimizer.state.values()))["exp_avg"].zero_(),
        lambda _, optimizer: setattr(optimizer, "note", 1),
        lambda model, optimizer: optimizer.state.pop(model[0].bias),
    ]
    for change in changes:
        model, optimizer = trained()
        before = snapshot(model, optimizer)
        assert differing(snapshot(model, optimizer), before) == []
        change(model, optimizer)
        assert differing(snapshot(model, optimizer), before) != []


def test_a_preparation_error_is_caught_in_three_ways() -> None:
    assert issubclass(PreparationError, MezzoError)
    assert issubclass(PreparationError, RuntimeError)
    assert issubclass(PreparationError, ValueError)


# Options

OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype-float32": ({"dtype": torch.float32}, r"torch.bfloat16 or torch.float16, got dtype=torch.float32"),
    "dtype-float8": ({"dtype": torch.float8_e4m3fn}, r"got dtype=torch.float8_e4m3fn"),
    "dtype-text": ({"dtype": "bfloat16"}, r"got dtype='bfloat16'"),
    "masters-text": ({"masters": "khan"}, r"masters is True, False or 'kahan', got 'khan'"),
    "masters-none": ({"masters": None}, r"got None"),
    "masters-number": ({"masters": 1}, r"masters is True, False or 'kahan', got 1"),
    "masters-list": ({"masters": [True]}, r"got \[True\]"),
    "masters-tensor": ({"masters": torch.ones(2)}, r"masters is True, False or 'kahan', got tensor"),
    "rounding": ({"rounding": "down"}, r"rounding is 'nearest' or 'stochastic', got 'down'"),
    "rounding-none": ({"rounding": None}, r"got None"),
    "seed-text": ({"seed": "0"}, r"seed is an int, got '0'"),
    "seed-bool": ({"seed": True}, r"seed is an int, got True"),
    "seed-none": ({"seed": None}, r"seed is an int, got None"),
    "grad-float64": (
        {"grad_dtype": torch.float64},
        r"grad_dtype is None, torch.float32 or the dtype .* got torch.float64",
    ),
    "grad-other-low": ({"grad_dtype": torch.float16}, r"torch.bfloat16; got torch.float16"),
    "grad-float16": (
        {"dtype": torch.float16, "grad_dtype": torch.float16},
        r"unscaled gradients underflow in float16.*Leave grad_dtype out.*or use dtype=torch.bfloat16",
    ),
    "grad-float16-kahan": (
        {"dtype": torch.float16, "grad_dtype": torch.float16, "masters": "kahan"},
        r"unscaled gradients underflow in float16",
    ),
    "grad-float32-for-an-optimizer-of-low-weights": (
        {"masters": False, "grad_dtype": torch.float32},
        r"grad_dtype=torch.float32.*masters=False",
    ),
    "compiled-kahan": (
        {"compiled": True, "masters": "kahan"},
        r"compiled=True steps with float32 masters.*masters='kahan', rounding='nearest'. Leave one of them out",
    ),
    "compiled-none": ({"compiled": True, "masters": False}, r"does not go with masters=False"),
    "compiled-stochastic": ({"compiled": True, "rounding": "stochastic"}, r"rounding='stochastic'"),
    "eps": (
        {"dtype": torch.float16, "masters": False},
        r"AdamW's eps=1e-08 is 0 in torch.float16.*NaN. Use masters=True, or rounding='stochastic'.*fused=True, or an eps",
    ),
    "low-names-nothing": (
        {"low": "decoder.*"},
        r"low='decoder.\*' names no parameter, .* module of this model. Its parameters",
    ),
    "keep-names-nothing": ({"keep": ["0.*", "heads"]}, r"keep='heads' names no parameter, .* module of this model"),
    "keep-a-near-name": ({"keep": "0.weigth"}, r"Did you mean '0.weight'"),
    "low-class-not-there": ({"low": nn.Conv2d}, r"low=Conv2d: no module of this class"),
    "keep-predicate-of-nothing": ({"keep": lambda *_: False}, r"is true for no parameter of this model"),
    "low-is-a-number": ({"low": 3}, r"low= takes a glob pattern.*got a int"),
    "keep-is-none": ({"keep": None}, r"keep= takes a glob pattern.*got a NoneType"),
    "keep-has-a-module": ({"keep": [nn.Linear(2, 2)]}, r"got a Linear. Give the module's name or its class, Linear"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_cannot_be_arecheck_refused(name: str) -> None:
    options, match = OPTIONS[name]
    model, optimizer = trained()
    check_refused(lambda: prepare(model, optimizer, **options), match, model, optimizer)
    prepare(model, optimizer)
    train(model, optimizer, 1)


def test_an_option_of_another_name_is_refused_by_python() -> None:
    model, optimizer = trained()
    check_refused(lambda: prepare(model, optimizer, master=True), "master", model, optimizer, kind=TypeError)
    check_refused(lambda: prepare(model, optimizer, LOW), "positional", model, optimizer, kind=TypeError)  # type: ignore[misc]


def test_an_unknown_policy_ischeck_refused() -> None:
    model, optimizer = trained()
    check_refused(lambda: prepare(model, optimizer, policy="bf17"), "bf17", model, optimizer, kind=MezzoError)


def test_a_predicate_that_raises_is_heard() -> None:
    model, optimizer = trained()

    def predicate(name: str, module: nn.Module, parameter: Tensor) -> bool:
        raise KeyError(name)

    check_refused(lambda: prepare(model, optimizer, low=predicate), "0.weight", model, optimizer, kind=KeyError)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.NAdam])
def test_an_eps_that_is_0_in_float16_is_refused_without_masters(make: Any) -> None:
    model = net()
    optimizer = make(model.parameters())
    options: dict[str, Any] = {"dtype": torch.float16, "masters": False}
    check_refused(lambda: prepare(model, optimizer, **options), f"{make.__name__}'s eps=1e-08", model, optimizer)


@pytest.mark.parametrize(
    ("numbers", "options"),
    [
        ({"fused": True}, {"dtype": torch.float16, "masters": False}),
        ({"eps": 1e-4}, {"dtype": torch.float16, "masters": False}),
        ({}, {"dtype": LOW, "masters": False}),
        ({}, {"dtype": torch.float16, "masters": False, "rounding": "stochastic"}),
        ({}, {"dtype": torch.float16, "masters": "kahan"}),
        ({}, {"dtype": torch.float16}),
    ],
)
def test_an_eps_that_counts_is_accepted(numbers: dict[str, Any], options: dict[str, Any]) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), **numbers)
    prepare(model, optimizer, **options)
    assert model[0].weight.dtype is options["dtype"]
    for one in model.parameters():
        one.grad = torch.zeros_like(one, dtype=one.grad_dtype)
    optimizer.step()
    assert all(one.isfinite().all() for one in model.parameters())


def test_an_eps_of_a_group_without_low_parameters_does_not_matter() -> None:
    model = net()
    groups = [
        {"params": model[1].parameters()},
        {"params": [*model[0].parameters(), *model[3].parameters()], "eps": 1e-4},
    ]
    prepare(model, torch.optim.AdamW(groups), dtype=torch.float16, masters=False)
    assert model[0].weight.dtype is torch.float16


def test_an_eps_is_looked_at_in_a_second_call_too() -> None:
    model = prepare(net(), dtype=torch.float16)
    optimizer = torch.optim.AdamW(model.parameters())
    check_refused(lambda: prepare(model, optimizer, dtype=torch.float16, masters=False), "eps=1e-08", model, optimizer)


# Models


@pytest.mark.parametrize("what", ["text", None, 3, torch.ones(2), [net()], net])
def test_what_is_no_module_ischeck_refused(what: Any) -> None:
    with pytest.raises(TypeError, match=f"prepare takes a torch.nn.Module, got {type(what).__name__}"):
        prepare(what)
    with pytest.raises(TypeError, match=f"unprepare takes a torch.nn.Module, got {type(what).__name__}"):
        unprepare(what)


@pytest.mark.parametrize("dtype", [LOW, torch.float16])
def test_a_model_in_low_precision_ischeck_refused(dtype: torch.dtype) -> None:
    model = net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    match = r"in low precision already: 6 of its parameters, such as '0.weight'.*Load the float32 weights first"
    check_refused(lambda: prepare(model, optimizer), match, model, optimizer)
    check_refused(lambda: prepare(model), match, model)


def test_a_model_that_is_partly_in_low_precision_ischeck_refused() -> None:
    model, optimizer = trained()
    model[3].bias.grad = None
    model[3].bias.data = model[3].bias.data.half()
    match = r"in low precision already: its parameter '3.bias' would have a master of rounded values"
    check_refused(lambda: prepare(model, optimizer), match, model, optimizer)


def test_a_model_without_shapes_ischeck_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(PreparationError, match=r"'0.weight' of LazyLinear has no shape.*Run one forward"):
        prepare(model)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_model_is_not_prepared_twice(setting: str) -> None:
    model, optimizer = run(**SETTINGS[setting])
    train(model, optimizer, 1)
    check_refused(
        lambda: prepare(model), r"prepared already. mezzo.torch.unprepare\(model\) undoes that", model, optimizer
    )
    match = "prepared already"
    check_refused(lambda: prepare(model, optimizer), match, model, optimizer)
    check_refused(lambda: prepare(model, optimizer, **SETTINGS[setting]), match, model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    check_refused(lambda: prepare(model, other), match, model, optimizer, other)
    train(model, optimizer, 1)


def test_a_second_optimizer_that_comes_later_ischeck_refused() -> None:
    model = net()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[3].parameters(), lr=0.1)
    prepare(model, first)
    match = r"an optimizer has its masters. Give all its optimizers in one call, prepare\(model, \[first, second\]\)"
    check_refused(lambda: prepare(model, second), match, model, first, second)


def test_a_model_prepared_for_inference_is_not_prepared_again_alone() -> None:
    model = prepare(net())
    check_refused(lambda: prepare(model), "The model is prepared already", model)


@pytest.mark.parametrize(
    "options", [{"dtype": torch.float16}, {"low": "**"}, {"keep": "0"}, {"buffers": True}, {"policy": "torch"}], ids=str
)
def test_the_second_call_does_not_choose_parameters(options: dict[str, Any]) -> None:
    model = prepare(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    match = r"prepared already, in torch.bfloat16, so which parameters to store low is settled"
    check_refused(lambda: prepare(model, optimizer, **options), match, model, optimizer)
    assert prepare(model, optimizer) == (model, optimizer)


def test_data_parallel_ischeck_refused() -> None:
    model, optimizer = trained()
    wrapped = nn.DataParallel(model)
    match = r"prepare takes the model inside of DataParallel, before it is wrapped.*then DataParallel\(model\)"
    check_refused(lambda: prepare(wrapped, optimizer), match, wrapped, optimizer)
    check_refused(lambda: unprepare(wrapped, optimizer), "unprepare takes the model inside of", wrapped, optimizer)


_DDP = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import mezzo.torch
from tests.torch.prepare.runs import differing, net, snapshot

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
wrapped = nn.parallel.DistributedDataParallel(net())
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
before = snapshot(wrapped, optimizer)
for call in (mezzo.torch.prepare, mezzo.torch.unprepare):
    try:
        call(wrapped, optimizer)
    except mezzo.errors.PreparationError as error:
        print(error)
assert differing(snapshot(wrapped, optimizer), before) == []
dist.destroy_process_group()
"""


def test_distributed_data_parallel_ischeck_refused(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", _DDP, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == (
        "prepare takes the model inside of DistributedDataParallel, before it is wrapped: model, optimizer = "
        "prepare(model, optimizer); then DistributedDataParallel(model)."
    )
    assert second.startswith("unprepare takes the model inside of DistributedDataParallel, before it is wrapped")


# Optimizers


@pytest.mark.parametrize("what", ["text", 3, torch.ones(2), net(), torch.optim.SGD, {}])
def test_what_is_no_optimizer_ischeck_refused(what: Any) -> None:
    model = net()
    match = f"prepare takes a torch.optim.Optimizer, or a list of them, got {type(what).__name__}"
    check_refused(lambda: prepare(model, what), match, model)
    check_refused(lambda: prepare(model, [what]), match, model)


def test_a_tuple_of_optimizers_ischeck_refused() -> None:
    model, optimizer = trained()
    pair: Any = (optimizer, optimizer)
    check_refused(lambda: prepare(model, pair), "or a list of them, got tuple", model, optimizer)


def test_a_scheduler_is_no_optimizer() -> None:
    model, optimizer = trained()
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    check_refused(lambda: prepare(model, scheduler), "got StepLR", model, optimizer)


def test_the_optimizer_of_another_model_ischeck_refused() -> None:
    (model, optimizer), (_, other) = trained(), trained()
    match = r"None of the 6 parameters of this AdamW are the model's.*Make the optimizer from model.parameters\(\)"
    check_refused(lambda: prepare(model, other), match, model, optimizer, other)
    check_refused(lambda: prepare(model, [optimizer, other]), match, model, optimizer, other)


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_optimizer_is_not_prepared_twice(setting: str) -> None:
    first, second = net(), net(1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    prepare(first, optimizer, **SETTINGS[setting])
    if setting == "none":
        prepare(second, optimizer, **SETTINGS[setting])  # there is nothing that the two would share
        return
    match = r"This SGD is prepared already.*prepare\(nn.ModuleList\(\[first, second\]\), optimizer\)"
    check_refused(lambda: prepare(second, optimizer), match, nn.ModuleList([first, second]), optimizer)


def test_an_optimizer_in_a_list_twice_ischeck_refused() -> None:
    model, optimizer = trained()
    check_refused(lambda: prepare(model, [optimizer, optimizer]), "An optimizer is in the list twice", model, optimizer)


def test_a_parameter_that_an_optimizer_has_already_is_not_added_again() -> None:
    model, optimizer = run()
    # It has the master, so PyTorch cannot tell; the next step is the first that can.
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model[0].weight]})
        train(model, optimizer, 1)


def test_two_optimizers_of_the_same_parameter_share_its_master() -> None:
    model = net()
    first, second = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model[0].parameters())
    prepare(model, [first, second])
    assert next(mezzo.torch.master_params(first)) is next(mezzo.torch.master_params(second))


def test_a_failed_call_leaves_a_run_as_it_would_be_without() -> None:
    (model, optimizer), (twin, other) = trained(), trained()
    for options, _ in OPTIONS.values():
        with pytest.raises(PreparationError):
            prepare(model, optimizer, **options)
    assert train(model, optimizer, 2, first=2) == train(twin, other, 2, first=2)
    assert same(optimizer.state_dict(), other.state_dict())
