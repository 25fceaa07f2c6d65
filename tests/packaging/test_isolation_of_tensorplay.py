"""Importing the adapter for TensorPlay is harmless, and its regions leave TensorPlay and PyTorch as they were.

Each test has a process of its own.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from .test_isolation import run

pytestmark = pytest.mark.skipif(find_spec("tensorplay") is None, reason="TensorPlay is not installed")

# Each attribute of the places where a patch could be, and the native autocast state of the thread.
BEFORE_AND_AFTER = """
import json, sys, threading
import tensorplay, tensorplay.amp.autocast_mode, tensorplay.amp.grad_scaler, tensorplay.optim, tensorplay.utils.checkpoint
import tensorplay.linalg, tensorplay.quantization

PLACES = {name: eval(name) for name in (
    "tensorplay tensorplay._C tensorplay.Tensor tensorplay.amp tensorplay.amp.autocast_mode "
    "tensorplay.amp.autocast_mode.autocast tensorplay.amp.grad_scaler tensorplay.amp.GradScaler tensorplay.autograd "
    "tensorplay.autograd.Function tensorplay.functional tensorplay.nn.functional tensorplay.nn.Module tensorplay.optim "
    "tensorplay.optim.Optimizer tensorplay.cuda tensorplay.overrides tensorplay.library tensorplay.func "
    "tensorplay.utils.checkpoint tensorplay.linalg tensorplay.quantization").split()}

def snapshot():
    native = [(tensorplay.is_autocast_enabled(device), str(tensorplay.get_autocast_dtype(device)))
              for device in ("cpu", "cuda")]
    return [dict(vars(place)) for place in PLACES.values()], [native, tensorplay.is_autocast_cache_enabled()]

# The package itself imports some of its parts when they are first asked for.
def by_itself(value):
    return isinstance(value, type(sys))

def changes(before, after):
    found = [f"{place}.{name}" for place, old, new in zip(PLACES, before[0], after[0])
             for name in {**old, **new} if old.get(name) is not new.get(name) and not by_itself(new.get(name))]
    return sorted(found + ["native state"] * (before[1] != after[1]))
"""

USES = """
untouched = snapshot()
import mezzo.tensorplay
from mezzo.tensorplay import autocast
imported = snapshot()

x = tensorplay.ones(4, 4, requires_grad=True)

def use(policy):
    with autocast("cpu", policy=policy):
        loss = (x @ x).softmax(-1).sum()
        with autocast("cpu", enabled=False):
            x @ x
    loss.backward()

for policy in ("default", "tensorplay", "unified", "fp32"):
    use(policy)
try:
    with autocast("cpu"):
        raise KeyError
except KeyError:
    pass
others = [threading.Thread(target=use, args=[policy]) for policy in ("unified", "fp32", "default")]
for thread in others:
    thread.start()
for thread in others:
    thread.join()
after = snapshot()
with autocast("cpu"):
    inside = snapshot()
print(json.dumps([changes(untouched, imported), changes(imported, after), changes(imported, inside),
                  changes(imported, snapshot())]))
"""


@pytest.fixture(scope="module")
def changed() -> list[list[str]]:
    """What is changed in one process by the import, by regions that have ended, by an open one, and after its end."""
    found = run(BEFORE_AND_AFTER + USES)
    assert len(found) == 4
    return found


def test_importing_the_adapter_changes_nothing_in_tensorplay(changed: list[list[str]]) -> None:
    assert changed[0] == []


def test_regions_that_have_ended_leave_every_name_as_it_was(changed: list[list[str]]) -> None:
    assert changed[1] == []
    assert changed[3] == []


def test_an_open_region_changes_names_at_the_choke_points_and_the_queries_alone(changed: list[list[str]]) -> None:
    names = set(changed[2]) - {"native state"}  # which is asked by way of the queries
    assert {"tensorplay._C.mm", "tensorplay._C.linear", "tensorplay.Tensor.__matmul__"} <= names
    ops = {name for name in names if "autocast" not in name and "fused_e" not in name}
    # Functions of these do in Python what an op of their name would, and never reach one that could be wrapped.
    assert {name.rpartition(".")[0] for name in ops} <= {
        "tensorplay",
        "tensorplay._C",
        "tensorplay.Tensor",
        "tensorplay.functional",
        "tensorplay.nn.functional",
        "tensorplay.linalg",
        "tensorplay.quantization",
    }
    assert {"tensorplay.is_autocast_enabled", "tensorplay.amp.autocast_mode._fused_enter"} <= names


def test_importing_the_adapter_imports_no_other_framework_and_no_tool() -> None:
    loaded = run(
        "import json, sys, mezzo.tensorplay; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    assert {"mezzo", "tensorplay"} <= set(loaded)
    assert not set(loaded) & {"torch", "jax", "ml_dtypes", "flax", "typer", "rich", "click", "sklearn", "matplotlib"}


def test_a_patch_would_be_seen() -> None:
    code = """
before = snapshot()
tensorplay._C.mm = tensorplay.Tensor.relu = lambda *arguments: None
tensorplay.amp.autocast_mode.mine = tensorplay._C.mm
tensorplay.set_autocast_enabled("cpu", True)
print(json.dumps(changes(before, snapshot())))
"""
    assert run(BEFORE_AND_AFTER + code) == [
        "native state",
        "tensorplay.Tensor.relu",
        "tensorplay._C.mm",
        "tensorplay.amp.autocast_mode.mine",
    ]


@pytest.mark.parametrize("order", ["torch tensorplay", "tensorplay torch"])
def test_regions_of_pytorch_and_of_tensorplay_do_not_see_each_other(order: str) -> None:
    """Imported in either order, nested in either order, with gradients."""
    first, second = order.split()
    code = f"""
import json
import mezzo.{first}, mezzo.{second}
import torch, tensorplay

def product(framework):
    weight = framework.ones(2, 2, requires_grad=True)
    result = weight @ weight
    result.float().sum().backward()
    return str(result.dtype).rpartition(".")[2], weight.grad.flatten().tolist()

low = "bfloat16", [4.0] * 4
full = "float32", [4.0] * 4
regions = dict(torch=lambda: mezzo.torch.autocast("cpu"), tensorplay=lambda: mezzo.tensorplay.autocast("cpu"))
found = []
for outer, inner in (("torch", "tensorplay"), ("tensorplay", "torch")):
    places = dict(torch=torch, tensorplay=tensorplay)
    with regions[outer]():
        found.append((product(places[outer]), product(places[inner])) == (low, full))
        with regions[inner]():
            found.append((product(places[outer]), product(places[inner])) == (low, low))
        found.append((product(places[outer]), product(places[inner])) == (low, full))
    found.append((product(places[outer]), product(places[inner])) == (full, full))
print(json.dumps(found))
"""
    assert run(code) == [True] * 8
