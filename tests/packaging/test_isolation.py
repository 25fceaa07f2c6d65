"""Importing is harmless, the parts depend on each other one way only, and every public name is there and documented."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .public_names import FILES, IMPORT_TENSORPLAY, MODULES, assert_offers_are_documented, assert_says_what_is_public

ADAPTERS = {"torch": {"torch"}, "jax": {"jax", "numpy"}, "tensorplay": {"tensorplay"}}
"""The adapters and what each may import: its framework, and for JAX, which is built on it, NumPy."""
FRONTS = {"cli", "demo", "__main__", "apex"}
CORE = (
    "errors",
    "stepwise",
    "decision",
    "report.numbers",
    "report.records",
    "report.nonfinite",
    "report.findings",
    "report.totals",
    "report.modules",
    "report.ops",
    "report.masks",
    "report.low_uses",
    "report.regions",
    "report.html_data",
    "report.lines",
    "report.worst",
    "report.module_ops",
    "report.tree",
    "report.module_text",
    "report.text",
    "report.saving",
    "report.where",
    "report.report",
    "report",
    "report.html",
    "report.picture",
    "scaling",
    "tables",
    "vocabulary",
    "tensorplay_names",
    "primitive_names",
    "policy_options",
    "rules",
    "primitive_effects",
    "tensorplay_effects",
    "explanation",
    "policy",
    "builtin",
    "policy_file",
)
"""The parts of the core. At import each needs only those before it; inside a function it may import any."""
ON_TOP = {"mezzo.torch.scaler", "mezzo.torch.deprecated"}
"""What stands beside the engine for PyTorch and needs a part that is built on it."""
PICTURES = {"mezzo.report.picture", "mezzo.torch.scaling.scale_picture"}
"""What draws imports matplotlib, an extra, when it is asked to draw."""


def run(code: str) -> Any:
    """Run code in a fresh process with warnings as errors; give what it prints, read as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


# Importing


def test_importing_the_core_imports_no_framework_and_no_tool() -> None:
    loaded = run("import json, sys, mezzo; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))")
    assert "mezzo" in loaded
    assert not set(loaded) & {
        "torch",
        "jax",
        "tensorplay",
        "numpy",
        "ml_dtypes",
        "typer",
        "rich",
        "click",
        "sklearn",
        "matplotlib",
    }


# What PyTorch is before and after: each attribute of the places where a patch could be, and the kernels of each key.
BEFORE_AND_AFTER = """
import json, torch, torch.utils.checkpoint
from torch.optim import optimizer

PLACES = [torch, torch.amp, torch.amp.autocast_mode, torch._C, torch.library, torch.Tensor, torch.nn.Module, torch.optim,
          torch.optim.Optimizer, torch.autograd, torch.autograd.Function, torch.cuda, torch.utils.checkpoint]
KEYS = ["AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS", "AutocastMTIA", "AutocastMAIA", "AutocastHPU",
        "AutocastXLA", "AutocastIPU", "AutocastPrivateUse1"]

def snapshot():
    attributes = [{name: id(value) for name, value in vars(place).items()} for place in PLACES]
    kernels = {key: sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in KEYS}
    hooks = len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)
    return attributes, kernels, hooks

def changes(before, after):
    found = [f"{place.__name__}.{name}" for place, old, new in zip(PLACES, before[0], after[0])
             for name in old if old[name] != new.get(name)]
    found += [key for key in KEYS if before[1][key] != after[1][key]]
    return sorted(found + ["optimizer hooks"] * (before[2] != after[2]))

keep = [list(vars(place).values()) for place in PLACES]  # so that no id is given out twice
"""


ONE_AFTER_THE_OTHER = """
untouched = snapshot()
import mezzo.torch
imported = snapshot()
with mezzo.torch.autocast("cpu", policy="torch"), mezzo.torch.autocast("auto"):
    torch.ones(2, 2) @ torch.ones(2, 2)
mezzo.torch.set_default_policy(None)
native = snapshot()
with mezzo.torch.autocast("cpu"):
    torch.ones(2, 2) @ torch.ones(2, 2)
default = snapshot()
print(json.dumps([changes(untouched, imported), changes(imported, native), changes(imported, default)]))
"""


@pytest.fixture(scope="module")
def changed() -> list[list[str]]:
    """What is changed in one process by the import, by PyTorch's own policy after it, and by that and the default."""
    found = run(BEFORE_AND_AFTER + ONE_AFTER_THE_OTHER)
    assert len(found) == 3
    return found


def test_importing_the_adapter_changes_nothing_in_pytorch(changed: list[list[str]]) -> None:
    assert changed[0] == []


def test_the_policy_that_is_pytorchs_own_changes_nothing_in_pytorch(changed: list[list[str]]) -> None:
    assert changed[1] == []


def test_the_default_policy_leaves_the_kernels_of_pytorchs_own_regions_alone(changed: list[list[str]]) -> None:
    assert changed[2] == ["AutocastIPU", "optimizer hooks", "torch.clear_autocast_cache"]


def test_another_policy_changes_what_the_guide_says_and_no_more() -> None:
    """``exp`` is on no list of PyTorch's for the CPU, ``linear`` is on it already."""
    code = """
import mezzo.torch
before = snapshot()
policy = mezzo.Policy("mine", {"exp": "fp32", "linear": "fp32"}, default="device", repairs=False)
mezzo.torch.autocast("cpu", policy=policy)
after = snapshot()
new = sorted(set(after[1]["AutocastCPU"]) - set(before[1]["AutocastCPU"]))
print(json.dumps([changes(before, after), new]))
"""
    changed, new = run(BEFORE_AND_AFTER + code)
    assert changed == ["AutocastCPU", "optimizer hooks", "torch.clear_autocast_cache"]
    assert new == ["aten::exp"]


def test_importing_the_adapter_asks_no_device() -> None:
    """Every call is watched, Python's and C's, for one that would start or count devices."""
    asked = run("""
import json, sys, torch
NAMES = {"is_available", "device_count", "current_device", "current_accelerator", "get_device_name", "init", "_lazy_init",
         "get_device_properties", "_cuda_getDeviceCount", "_cuda_init", "_accelerator_getAccelerator", "is_bf16_supported"}
asked = []

def watch(frame, event, argument):
    name = frame.f_code.co_name if event == "call" else getattr(argument, "__name__", "")
    module = frame.f_globals.get("__name__", "") if event == "call" else str(getattr(argument, "__module__", ""))
    if event in ("call", "c_call") and name in NAMES and module.startswith("torch"):
        asked.append(f"{module}.{name}")

sys.setprofile(watch)
torch.accelerator.current_accelerator()
control = len(asked)
import mezzo.torch
sys.setprofile(None)
print(json.dumps([control > 0, asked[control:], torch.cuda.is_initialized()]))
""")
    assert asked == [True, [], False]


def test_watching_does_not_import_the_compiler() -> None:
    """PyTorch's dispatch modes import Dynamo when one first sees an op; all that PyTorch computes is slower from then on."""
    assert (
        run("""
import json, sys, torch, mezzo.torch
net, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
for watch in (mezzo.torch.explain(), mezzo.torch.explain(numerics=True, shadow=True), mezzo.torch.find_nonfinite()):
    with watch:
        with mezzo.torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(x).float().sum()
        loss.backward()
    str(watch.report)
print(json.dumps("torch._dynamo" in sys.modules))
""")
        is False
    )


# Dependencies


def imports(name: str, *, at_import: bool) -> Iterator[str]:
    """Give the modules that a module of ours imports; at its own import only, or anywhere in it."""
    path = FILES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = _run_at_import(tree.body) if at_import else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            # `from mezzo import tables` is about the module mezzo.tables.
            modules = [f"{base}.{alias.name}" for alias in node.names]
            yield from (module if module in FILES else base for module in modules)


def _run_at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if hasattr(node, "body"):
            yield from _run_at_import(node.body)
        else:
            yield node


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def when_drawing(name: str) -> set[str]:
    """Give what a module may import inside of a function besides the rest."""
    return {"matplotlib"} if name in PICTURES else set()


def part(module: str) -> str:
    """Give the part of mezzo that a module belongs to, of the report the file; an empty string for the package itself."""
    return module.removeprefix("mezzo.") if module.startswith("mezzo.report.") else [*module.split("."), ""][1]


def test_every_module_belongs_to_a_part_that_is_known_here() -> None:
    parts = {part(name) for name in FILES} - {""}
    assert parts - set(ADAPTERS) - FRONTS == set(CORE)


@pytest.mark.parametrize("name", [name for name in FILES if part(name) in CORE])
def test_the_core_needs_only_the_core_and_the_standard_library(name: str) -> None:
    for module in imports(name, at_import=False):
        if module.startswith("mezzo"):
            assert part(module) in CORE, module
        else:
            assert module.split(".")[0] in sys.stdlib_module_names | {"__future__"} | when_drawing(name), module
    earlier = CORE[: CORE.index(part(name)) + 1]
    assert {part(module) for module in imports(name, at_import=True) if module.startswith("mezzo")} <= set(earlier)


@pytest.mark.parametrize("name", [name for name in FILES if part(name) in ADAPTERS])
def test_an_adapter_needs_the_core_its_framework_and_no_other_adapter(name: str) -> None:
    for module in imports(name, at_import=False):
        if module.startswith("mezzo"):
            assert part(module) in {*CORE, part(name), ""}, module
        else:
            allowed = ADAPTERS[part(name)] | when_drawing(name)
            assert module.split(".")[0] in {*sys.stdlib_module_names, "__future__", *allowed}, module


def test_the_engine_for_pytorch_needs_nothing_of_what_is_built_on_it() -> None:
    built = {name for name, path in FILES.items() if name.startswith("mezzo.torch.") and path.name == "__init__.py"}
    assert {"mezzo.torch.masters", "mezzo.torch.scaling", "mezzo.torch.recording", "mezzo.torch.linting"} < built
    engine = {name for name in FILES if name.rpartition(".")[0] == "mezzo.torch"} - built - ON_TOP
    assert {"mezzo.torch.autocast", "mezzo.torch.kernels", "mezzo.torch.cache", "mezzo.torch.casting"} < engine
    found = [
        f"{name} imports {module}"
        for name in sorted(engine)
        for module in imports(name, at_import=False)
        if module in ON_TOP or any(f"{module}.".startswith(f"{package}.") for package in built)
    ]
    assert found == []


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_what_draws_imports_matplotlib_only_when_it_draws(name: str) -> None:
    assert any(module.startswith("matplotlib") for module in imports(name, at_import=False))
    assert not any(module.startswith("matplotlib") for module in imports(name, at_import=True))


@pytest.mark.parametrize("name", [name for name in FILES if part(name) == "apex"])
def test_the_front_for_apexs_scripts_needs_the_core_and_the_adapter_for_pytorch(name: str) -> None:
    for module in imports(name, at_import=False):
        if module.startswith("mezzo"):
            assert part(module) in {*CORE, "apex", "torch", ""}, module
        else:
            assert module.split(".")[0] in {*sys.stdlib_module_names, "__future__", "torch"}, module


def test_the_package_itself_offers_the_core_alone() -> None:
    assert {part(module) for module in imports("mezzo", at_import=False) if module.startswith("mezzo")} <= set(CORE)


def test_the_dependencies_are_read_off_the_files() -> None:
    """So that the tests above do not pass by seeing nothing."""
    assert {"mezzo.tables", "mezzo.errors", "mezzo.policy_file"} <= set(imports("mezzo.policy", at_import=False))
    assert "mezzo.policy_file" not in set(imports("mezzo.policy", at_import=True))
    assert "mezzo.builtin" in set(imports("mezzo.torch.autocast", at_import=True))
    assert {"jax", "mezzo.jax.settings"} <= set(imports("mezzo.jax.autocast", at_import=True))
    assert {"tensorplay", "mezzo.errors"} <= set(imports("mezzo.tensorplay.contract", at_import=True))


# Names

# Those that need TensorPlay are imported in a process of their own: tests/tensorplay/packaging.


@pytest.mark.parametrize("name", [name for name in MODULES if name not in IMPORT_TENSORPLAY])
def test_what_a_module_offers_is_there_and_has_a_docstring(name: str) -> None:
    assert_offers_are_documented(name)


@pytest.mark.parametrize(
    "name",
    [
        "mezzo",
        "mezzo.torch",
        "mezzo.torch.cuda.amp",
        "mezzo.torch.cpu.amp",
        "mezzo.jax",
        "mezzo.demo",
        "mezzo.apex.amp",
    ],
)
def test_packages_say_what_is_public(name: str) -> None:
    assert_says_what_is_public(name)


# Files


@pytest.mark.parametrize("path", FILES.values(), ids=FILES)
def test_a_file_has_one_idea(path: Path) -> None:
    assert path.name not in {"utils.py", "helpers.py", "common.py", "misc.py"}
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_the_files_that_a_stack_is_read_by_are_there() -> None:
    """What an op is taken for, and which frames a traceback leaves out, is told by the names of our files."""
    named = run(STACK_FILES)
    assert len(named) > 15
    assert [path for path in named if not Path(path).exists()] == []


STACK_FILES = """
import json
from mezzo.cli import watch_frames
from mezzo.torch.recording import call_sites
named = [*watch_frames._WATCHING, *call_sites._WATCHES, *call_sites._STEPS]
print(json.dumps(named))
"""
