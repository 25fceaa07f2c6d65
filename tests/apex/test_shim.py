"""What ``import apex`` gives where the stand-in is: mezzo's modules, and those of an installed Apex before them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .running import STAND_IN, output, python

ALIASES = """
import importlib, sys
import apex
import mezzo.apex

before = "torch" in sys.modules
import apex.amp, apex.amp._amp_state, apex.amp.frontend
from apex import amp
from apex.amp import _amp_state as as_attribute
from apex.amp._amp_state import _amp_state as as_module, maybe_print
import apex.parallel.LARC
from apex.parallel import LARC, DistributedDataParallel, convert_syncbn_model
from apex.parallel.LARC import LARC as from_module
from apex.fp16_utils import *
from apex.optimizers.fused_adam import FusedAdam
from apex.optimizers.fused_lamb import FusedLAMB
from apex.normalization.fused_layer_norm import FusedLayerNorm, MixedFusedRMSNorm
from apex.multi_tensor_apply import multi_tensor_applier
import mezzo.apex.fp16_utils, mezzo.apex.optimizers

assert not before
assert amp is apex.amp is mezzo.apex.amp
assert apex.parallel is mezzo.apex.parallel
assert apex.optimizers is mezzo.apex.optimizers and FusedAdam is apex.optimizers.FusedAdam
assert as_attribute is as_module is amp._amp_state is mezzo.apex.amp._amp_state
assert as_module is sys.modules["mezzo.apex.amp._amp_state"]._amp_state
assert not isinstance(as_attribute, type(sys))
assert LARC is from_module is apex.parallel.LARC is mezzo.apex.parallel.LARC and isinstance(LARC, type)
assert to_python_float is network_to_half.__globals__["to_python_float"]
ours = {name: module.__name__ for name, module in sys.modules.items() if name.startswith("apex.")}
copies = {name for name, there in ours.items() if not there.startswith("mezzo.")}
assert copies == set(), copies
for name in ("amp", "parallel", "fp16_utils", "optimizers", "multi_tensor_apply", "normalization"):
    assert importlib.import_module("apex." + name) is importlib.import_module("mezzo.apex." + name)
print("all the same")
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_every_way_to_import_gives_mezzos_own_modules(tmp_path: Path) -> None:
    assert output(write(tmp_path / "script.py", ALIASES)) == "all the same\n"


def test_parts_are_attributes_after_importing_the_package_alone(tmp_path: Path) -> None:
    text = """
import apex
print(apex.amp.initialize.__module__, hasattr(apex, "contrib"), "parallel" in vars(apex))
print(apex.parallel.LARC.__module__)
"""
    assert output(write(tmp_path / "script.py", text)) == (
        "mezzo.apex.amp.frontend False False\nmezzo.apex.parallel.larc\n"
    )


def test_importing_mezzos_own_modules_adds_no_apex() -> None:
    code = """
import sys
path, finders = sys.path[:], sys.meta_path[:]
import mezzo.apex, mezzo.apex.runner, mezzo.apex.stand_in, mezzo.apex.installed
import mezzo.apex.parallel, mezzo.apex.fp16_utils, mezzo.apex.optimizers, mezzo.apex.normalization
import mezzo.apex.shim.apex, mezzo.apex.multi_tensor_apply, importlib.util, os
assert [sys.path, sys.meta_path] == [path, finders]
assert not [name for name in sys.modules if name.split(".")[0] == "apex"]
print(importlib.util.find_spec("apex"), "PYTHONPATH" in os.environ)
"""
    done = python("-c", code)
    assert (done.stdout, done.stderr) == ("None False\n", "")


# What is not there


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("import apex.RNN", "There is no module 'apex.RNN': apex is mezzo's here, which stands in for apex.amp, apex."),
        ("from apex import RNN", "torch.nn.RNN, LSTM and GRU serve in its place."),
        ("from apex.contrib.optimizers import FP16_Optimizer", "Parts of it need CUDA extensions"),
        ("from apex.transformer import parallel_state", "It moved to Megatron-LM."),
        ("import apex.nothing", "If the script needs it, it needs an Apex that has it."),
    ],
)
def test_what_there_is_not_is_named_with_what_there_is(tmp_path: Path, statement: str, message: str) -> None:
    text = f"try:\n    {statement}\nexcept ImportError as error:\n    print(type(error).__name__, error)\n"
    said = output(write(tmp_path / "script.py", text))
    assert said.startswith("ModuleNotFoundError ")
    assert message in said


def test_submodules_that_there_are_not_are_named_with_what_is_public(tmp_path: Path) -> None:
    text = """
for name in ("amp.opt", "optimizers.lion"):
    try:
        __import__("apex." + name)
    except ModuleNotFoundError as error:
        print(error)
"""
    amp, optimizers = output(write(tmp_path / "script.py", text)).splitlines()
    assert amp.startswith("apex.amp is mezzo's here, and has no module 'opt'. Import what is public")
    for name in ("initialize", "scale_loss", "master_params"):
        assert name in amp
    assert optimizers == (
        "apex.optimizers is mezzo's here, and has no module 'lion'. Import what is public from apex.optimizers itself: "
        "FusedAdagrad, FusedAdam, FusedLAMB, "
        "FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD."
    )


def test_one_can_ask_whether_there_is_a_module(tmp_path: Path) -> None:
    text = """
from importlib.util import find_spec
names = ["apex", "apex.amp", "apex.parallel", "apex.contrib", "apex.nothing"]
print([find_spec(name) is not None for name in names])
"""
    assert output(write(tmp_path / "script.py", text)) == "[True, True, True, False, False]\n"


# Besides an installed Apex


def installed(folder: Path, **files: str) -> dict[str, str]:
    """Write a package `apex` with these submodules; give an environment in which it is found after the stand-in."""
    for name, text in {"__init__": "", **files}.items():
        write(folder / "apex" / f"{name.replace('__in__', '/')}.py", text)
    return {"PYTHONPATH": str(folder)}


WHERE = """
import apex
from apex import multi_tensor_apply
from importlib.util import find_spec
mine = find_spec("apex.optimizers").origin == "mezzo.apex.optimizers"
print(multi_tensor_apply.__name__, "mezzo's optimizers" if mine else "their optimizers", find_spec("apex.amp").origin)
"""


def test_of_an_installed_apex_without_amp_its_own_modules_win(tmp_path: Path) -> None:
    init = """
from . import optimizers
from apex.optimizers import mark
VERSION = "real " + mark
def __getattr__(name):
    if name == "lazy":
        return "theirs"
    raise AttributeError("of theirs: " + name)
"""
    environment = installed(tmp_path / "site", __init__=init, optimizers="mark = 'mark'", contrib="")
    text = (
        WHERE
        + """
import os, apex.contrib, importlib.resources
print(apex.VERSION, apex.lazy, apex.__file__ == apex.__spec__.origin, os.path.dirname(apex.__file__) == apex.__path__[0])
print(importlib.resources.files("apex").joinpath("optimizers.py").read_text())
print(apex.multi_tensor_apply.multi_tensor_applier.available)
try:
    apex.other
except AttributeError as error:
    print(error)
try:
    import apex.transformer
except ImportError as error:
    print(error)
"""
    )
    said = output(write(tmp_path / "script.py", text), environment=environment).splitlines()
    assert said[:5] == [
        "mezzo.apex.multi_tensor_apply their optimizers mezzo.apex.amp",
        "real mark theirs True True",
        "mark = 'mark'",
        "False",
        "of theirs: other",
    ]
    assert said[5].startswith(
        f"There is no module 'apex.transformer': the Apex installed in {tmp_path / 'site' / 'apex'} has none, nor has mezzo"
    )


def test_amp_of_mezzo_goes_with_an_installed_apex(tmp_path: Path) -> None:
    environment = installed(tmp_path / "site", optimizers="class FusedAdam: pass")
    text = """
import apex, mezzo.apex.amp
from apex import amp
from apex.amp._amp_state import _amp_state
from apex.optimizers import FusedAdam
print(amp is mezzo.apex.amp is apex.amp, _amp_state is amp._amp_state, FusedAdam.__module__)
"""
    said = output(write(tmp_path / "script.py", text), environment=environment)
    assert said == "True True apex.optimizers\n"


def test_an_installed_apex_that_has_amp_is_left_as_it_is(tmp_path: Path) -> None:
    environment = installed(tmp_path / "site", amp="mine = 1", optimizers="", parallel="")
    text = """
import sys, apex
from apex import amp
print(amp.mine, amp.__name__, apex.__path__, sorted(name for name in vars(apex) if not name.startswith("_")))
try:
    import apex.fp16_utils
except ImportError as error:
    print(error)
"""
    said = output(write(tmp_path / "script.py", text), environment=environment).splitlines()
    assert said == [f"1 apex.amp {[str(tmp_path / 'site' / 'apex')]} ['amp']", "No module named 'apex.fp16_utils'"]


@pytest.mark.parametrize("kind", ["package", "module", "folder"])
def test_another_package_of_that_name_is_not_taken_for_it(tmp_path: Path, kind: str) -> None:
    """On PyPI there is an `apex` for web sites; and a checkout is a folder `apex` around the package."""
    site = tmp_path / "site"
    if kind == "package":
        installed(site, __init__="raise RuntimeError('run')", views="", forms="")
    elif kind == "module":
        write(site / "apex.py", "raise RuntimeError('run')")
    else:
        write(site / "apex" / "apex" / "__init__.py", "raise RuntimeError('run')")
        write(site / "apex" / "optimizers" / "notes.txt", "")
    said = output(write(tmp_path / "script.py", WHERE), environment={"PYTHONPATH": str(site)})
    assert said == "mezzo.apex.multi_tensor_apply mezzo's optimizers mezzo.apex.amp\n"


def test_what_an_installed_apex_raises_is_raised(tmp_path: Path) -> None:
    environment = installed(tmp_path / "site", __init__="raise ImportError('no CUDA here')", optimizers="")
    done = python(*STAND_IN, write(tmp_path / "script.py", "import apex"), environment=environment)
    assert done.returncode == 1
    assert done.stderr.endswith("ImportError: no CUDA here\n")


def test_an_apex_in_the_scripts_own_folder_is_completed_too(tmp_path: Path) -> None:
    installed(tmp_path, optimizers="")
    said = output(write(tmp_path / "script.py", WHERE))
    assert said == "mezzo.apex.multi_tensor_apply their optimizers mezzo.apex.amp\n"


def test_an_apex_that_another_finder_finds_is_found(tmp_path: Path) -> None:
    """As installed with ``pip install --editable``."""
    installed(tmp_path / "checkout", optimizers="")
    finder = f"""
import importlib.util, sys
class Editable:
    def find_spec(self, name, path, target=None):
        if name == "apex":
            place = {str(tmp_path / "checkout" / "apex")!r}
            return importlib.util.spec_from_file_location(name, place + "/__init__.py", submodule_search_locations=[place])
sys.meta_path.append(Editable())
"""
    said = output(write(tmp_path / "script.py", finder + WHERE))
    assert said == "mezzo.apex.multi_tensor_apply their optimizers mezzo.apex.amp\n"


def test_two_folders_of_stand_ins_do_not_take_each_other_for_an_installed_apex(tmp_path: Path) -> None:
    other = tmp_path / "mezzo" / "apex" / "shim"
    write(other / "apex" / "__init__.py", "raise RuntimeError('run')")
    said = output(write(tmp_path / "script.py", WHERE), environment={"PYTHONPATH": str(other)})
    assert said == "mezzo.apex.multi_tensor_apply mezzo's optimizers mezzo.apex.amp\n"
