"""Names of TensorPlay's ops: each spelling is what its call enters, and a canonical name is itself and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from mezzo import UnknownOpError
from mezzo.tables import read
from mezzo.vocabulary import vocabulary

ROOT = Path(__file__).parents[2]
words = vocabulary("tensorplay")

# As `mezzo.tensorplay` wraps the operators of Python, which are methods of their own.
OPERATORS = {
    "__matmul__": "matmul",
    "__rmatmul__": "matmul",
    "__add__": "add",
    "__radd__": "add",
    "__sub__": "sub",
    "__rsub__": "rsub",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__truediv__": "div",
    "__rtruediv__": "div",
    "__pow__": "pow",
    "__rpow__": "pow",
    "__neg__": "neg",
}

installed = pytest.mark.skipif(find_spec("tensorplay") is None, reason="needs TensorPlay")


@cache
def reached() -> dict[str, list[str]]:
    """Give the ops that calls enter in the installed TensorPlay, which is loaded in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.tensorplay_reached"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return {name: [OPERATORS.get(op, op) for op in ops] for name, ops in found.items()}


def covered(name: str) -> set[str]:
    try:
        return {*words.resolve(name), *words.inside(name)}
    except UnknownOpError:
        return set(words.inside(name))


# Against the installed TensorPlay


@installed
def test_the_catalog_is_that_of_the_installed_tensorplay() -> None:
    program = (
        f"import json, runpy; found = runpy.run_path({str(ROOT / 'scripts' / 'tensorplay_catalog.py')!r})['catalog']()"
    )
    program += "; print(json.dumps({op: sorted(traits) for op, traits in found.items()}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {row["op"]: row["traits"].split() for row in read("tensorplay", "ops")}


@installed
def test_every_call_of_the_probe_works() -> None:
    failed = {name: ops for name, ops in reached().items() if any("Error" in op for op in ops)}
    assert failed == {}


@installed
def test_a_name_covers_every_op_that_computes_in_its_call() -> None:
    missed = {
        name: [op for op in ops if "compute" in words.traits[op] and op not in covered(name)]
        for name, ops in reached().items()
    }
    # softmin and gumbel_softmax stand for the softmax in them, KLDivLoss for its loss without the division by the batch,
    # RReLU for the op that draws its slopes from noise; a batch of padding and masks is not what a rule is for.
    assert {name: ops for name, ops in missed.items() if ops} == {
        "F.kl_div": ["div"],
        "nn.KLDivLoss": ["div"],
        "F.softmin": ["neg"],
        "nn.Softmin": ["neg"],
        "F.gumbel_softmax": ["log", "neg", "add", "div"],
        "F.rrelu": ["mul", "add"],
        "nn.RReLU": ["mul", "add"],
        "fft.fftfreq": ["cat", "mul"],
        "fft.rfftfreq": ["mul"],
    }


@installed
def test_a_name_that_stands_for_ops_enters_one_of_them() -> None:
    for name, ops in reached().items():
        try:
            found = words.resolve(name)
        except UnknownOpError:
            continue
        assert set(found) & set(ops) or set(words.inside(name)) & set(ops), name


# The data alone


def test_each_op_and_alias_stands_once() -> None:
    ops = [row["op"] for row in read("tensorplay", "ops")]
    assert ops == sorted(set(ops))
    names = [row["name"] for row in read("tensorplay", "aliases")]
    assert len(names) == len(set(names))
    assert not set(names) & set(ops), "an alias would hide the op of its name"


def test_no_trait_is_misspelled_and_no_op_has_an_overload_or_a_namespace() -> None:
    assert {trait for traits in words.traits.values() for trait in traits} == {"compute", "mutates", "dtype"}
    assert [op for op in words.traits if "." in op or ":" in op] == []


def test_a_name_with_an_underscore_at_its_end_writes_in_place() -> None:
    for op, traits in words.traits.items():
        if op.endswith("_") and not op.startswith("__"):
            assert "mutates" in traits, op
        assert not {"mutates", "compute"} <= traits, op


def test_every_canonical_name_is_itself() -> None:
    assert [op for op in words.traits if words.resolve(op)[0] != op or words.resolve(f"_C.{op}") != (op,)] == []
    assert [op for op in words.traits if words.resolve(words.alone(op)) != (op,)] == []
    assert [op for op in words.traits if words.resolve(f"tensorplay._C.{op}") != (op,)] == []
    assert [op for op in words.traits if words.covers(op)[0] != op] == []


def test_every_alias_names_ops_that_exist() -> None:
    for name, alias in words.aliases.items():
        assert alias.ops or alias.inside, name
        assert [op for op in alias.ops + alias.inside if op not in words.traits] == [], name


@pytest.mark.parametrize(
    ("written", "ops"),
    [
        ("softmax", {"softmax"}),
        ("tensorplay.softmax", {"softmax"}),
        ("tp.softmax", {"softmax"}),
        ("F.softmax", {"softmax"}),
        ("nn.functional.softmax", {"softmax"}),
        ("tensorplay.nn.functional.softmax", {"softmax"}),
        ("tensorplay.functional.softmax", {"softmax"}),
        ("Tensor.softmax", {"softmax"}),
        ("tensorplay.Tensor.softmax", {"softmax"}),
        ("_C.softmax", {"softmax"}),
        ("special.softmax", {"softmax"}),
        ("nn.Softmax", {"softmax"}),
        ("Softmax", {"softmax"}),
        ("softmin", {"softmax"}),
        ("__matmul__", {"matmul"}),
        ("Tensor.__matmul__", {"matmul"}),
        ("__rsub__", {"rsub"}),
        ("__rtruediv__", {"div"}),
        ("__iadd__", {"add_"}),
        ("Tensor.add_", {"add_"}),
        ("nn.Linear", {"linear"}),
        ("tensorplay.nn.Linear", {"linear"}),
        ("tp.nn.modules.linear.Linear", {"linear"}),
        ("Conv2d", {"conv2d"}),
        ("linalg.inv", {"linalg_inv"}),
        ("tensorplay.linalg.inv", {"linalg_inv"}),
        ("linalg_inv", {"linalg_inv"}),
        ("linalg.matmul", {"matmul"}),
        ("fft.rfft", {"fft_rfft"}),
        ("tp.special.expit", {"sigmoid"}),
        ("special.erf", {"erf"}),
        ("F.kl_div", {"tp_kl_div"}),
        ("kl_div", {"kl_div", "tp_kl_div"}),
        ("_C.kl_div", {"kl_div"}),
        ("F.bilinear", {"bilinear"}),
        ("cross_entropy", {"cross_entropy_loss"}),
        ("F.cross_entropy", {"cross_entropy_loss"}),
        ("tensorplay.nn.CrossEntropyLoss", {"cross_entropy_loss"}),
        ("linalg.norm", {"linalg_norm"}),
        ("tensorplay.tensordot", {"tensordot"}),
        ("nn.KLDivLoss", {"tp_kl_div"}),
        ("F.nll_loss", {"nll_loss", "nll_loss2d"}),
        ("grid_sample", {"grid_sampler_2d", "grid_sampler_3d"}),
        ("F.scaled_dot_product_attention", {"scaled_dot_product_attention", "_scaled_dot_product_attention_math"}),
    ],
)
def test_spellings(written: str, ops: set[str]) -> None:
    assert set(words.resolve(written)) == ops


@pytest.mark.parametrize(
    ("written", "inside"),
    [
        ("LSTMCell", ("linear", "add", "sigmoid", "tanh", "mul")),
    ],
)
def test_a_composition_is_no_op_and_the_error_names_its_parts(written: str, inside: tuple[str, ...]) -> None:
    assert words.inside(written) == inside
    with pytest.raises(UnknownOpError, match=f"is no op of TensorPlay: it is composed of {', '.join(inside)}. Name"):
        words.resolve(written)


def test_the_function_of_an_ops_name_may_enter_other_ops() -> None:
    assert words.inside("bilinear") == ("matmul",)
    assert words.covers("kl_div") == ("kl_div", "tp_kl_div")
    assert words.covers("nll_loss") == ("nll_loss", "nll_loss2d")
    assert words.inside("linalg_norm") == ("abs", "pow", "sum")
    assert words.inside("mm") == words.inside("kl_div") == words.inside("nowhere") == ()


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("sofmax", "'sofmax' is no op of TensorPlay. Did you mean 'softmax'"),
        ("F.sofmax", "'F.sofmax' is no op of TensorPlay. Did you mean 'softmax'"),
        ("torch.softmax", "'torch.softmax' is no op of TensorPlay. Did you mean 'softmax'"),
        ("nn.Liner", "'nn.Liner' is no op of TensorPlay. Did you mean 'Linear'"),
        (
            "sum.dim_IntList",
            "'sum.dim_IntList' is no op of TensorPlay, whose ops are named without overloads. Did you mean 'sum'?",
        ),
        (
            "aten::mm",
            "'aten::mm' is no op that a policy for TensorPlay names: these names have no namespace. Did you mean",
        ),
        ("prims::_sink_tokens", "'prims::_sink_tokens' is no op that a policy for TensorPlay names"),
        ("mylib::attention", "'mylib::attention' is no op that a policy for TensorPlay names"),
        ("xyzzy", "'xyzzy' is no op of TensorPlay. `mezzo ops --framework tensorplay` lists the ops"),
    ],
)
def test_what_is_no_name_is_told_what_is(written: str, text: str) -> None:
    with pytest.raises(UnknownOpError) as caught:
        words.resolve(written)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("written", ["", "tensorplay.", "F.", "nn.", "_C.", "softmax.", ".softmax", "::", "linalg."])
def test_half_a_name_raises(written: str) -> None:
    with pytest.raises(UnknownOpError):
        words.resolve(written)


def test_a_name_is_a_string() -> None:
    with pytest.raises(UnknownOpError, match="op names are strings such as 'softmax', got 3"):
        words.resolve(3)  # type: ignore[arg-type]
