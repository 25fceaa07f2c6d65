"""The built-in tables against what the installed PyTorch registers, and the rules in them against what its kernels do."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from mezzo.decision import CastPolicy
from mezzo.tables import device_table, devices, own_kernels
from mezzo.torch.ops import TableChange, installed_catalog, op_spec
from mezzo.vocabulary import Vocabulary, vocabulary

REGISTERED = ["cpu", "cuda", "xpu", "mps", "mtia", "maia"]

# Kernels that only builds with cuDNN register.
CUDNN_ONLY = {"aten::_cudnn_rnn"}

# In a process of its own: mezzo's kernels, which other tests register in this one, are listed too.
READ = """
import json
from mezzo.torch.ops import table_change
changes = [table_change(device) for device in {devices}]
print(json.dumps([[change.device, sorted(change.added), sorted(change.removed), str(change)] for change in changes]))
"""


@pytest.fixture(scope="module")
def changes() -> dict[str, tuple[set[str], set[str], str]]:
    code = READ.format(devices=REGISTERED)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    return {device: (set(added), set(removed), text) for device, added, removed, text in json.loads(done.stdout)}


@pytest.mark.parametrize("device", REGISTERED)
def test_the_table_is_what_pytorch_registers(device: str, changes: dict[str, tuple[set[str], set[str], str]]) -> None:
    added, removed, text = changes[device]
    without_cudnn = not torch.backends.cudnn.is_available()
    assert (added, removed - (CUDNN_ONLY if without_cudnn else set())) == (set(), set()), text


def test_a_difference_is_said_op_by_op() -> None:
    change = TableChange("cpu", added=frozenset({"aten::new"}), removed=frozenset({"aten::old"}))
    assert change
    assert str(change).splitlines() == [
        f"cpu: torch {torch.__version__} differs from the built-in table",
        "  + aten::new is registered and not in the table",
        "  - aten::old is in the table and not registered",
    ]
    assert not TableChange("cpu", frozenset(), frozenset())


def test_the_catalog_is_the_installed_pytorchs() -> None:
    """If this fails after the pin of PyTorch moved: python scripts/generate_catalog.py."""
    data = vocabulary.__wrapped__("torch").traits
    installed = installed_catalog()
    assert set(data) == set(installed), {
        "new": sorted(set(installed) - set(data)),
        "gone": sorted(set(data) - set(installed)),
    }
    assert data == installed


def test_ops_that_are_newer_than_the_data_are_learned() -> None:
    words = Vocabulary({"aten::old": frozenset({"compute"})})
    words.learn({"aten::old": frozenset(), "aten::new.x": frozenset({"compute"}), "aten::new.out": frozenset({"out"})})
    assert words.resolve("new") == ("aten::new.x",)
    assert words.traits["aten::old"] == {"compute"}, "known traits stay"


@pytest.mark.parametrize("device", devices())
def test_every_op_of_a_table_has_a_schema_that_its_rule_fits(device: str) -> None:
    for op, rule in device_table(device).items():
        spec = op_spec(op)
        assert spec is not None, op
        assert spec.tensors or spec.tensor_lists, op
        if rule is CastPolicy.FP32_SET_OPT_DTYPE:
            assert spec.dtype is not None, op


def test_the_number_of_ops_by_rule() -> None:
    """The counts of ATen's lists, so that a row cannot get lost."""
    expected = {
        "cpu": (24, 100, 0, 0, 3, 0),
        "cuda": (35, 59, 11, 2, 11, 1),
        "xpu": (33, 59, 11, 2, 11, 1),
        "mtia": (33, 59, 11, 2, 11, 1),
        "maia": (33, 59, 11, 2, 11, 1),
        "reference": (33, 59, 11, 2, 11, 1),
        "mps": (26, 59, 0, 0, 10, 0),
    }
    rules = list(CastPolicy)[:6]
    counted = {device: tuple(list(device_table(device).values()).count(rule) for rule in rules) for device in devices()}
    assert counted == expected
    assert {device: own_kernels(device) for device in devices() if own_kernels(device)} == {"cuda": CUDNN_ONLY}
