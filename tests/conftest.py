"""What every test here relies on: GPU tests that skip or insist, and no test that leaks autocast state."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from . import jax_state, tensorplay_state
from .slow_files import slow_files_first

# The nets of the tests are small: threads would mostly wait for each other, the more so on a busy machine.
# PyTorch reads this when it is imported, which is later than here.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# JAX reads these when it is first asked for a device: the tests of sharding need several, and the CPU can play eight.
# Most of the tests' time would be LLVM's, for programs that run once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")

# These need processes of their own: tests/torch/test_accelerator_suite.py, tests/test_tensorplay_suite.py and
# tests/test_tensorplay_folders.py start them. A path to them given on the command line is not ignored.
collect_ignore = ["accelerator", "tensorplay"]

NO_GPU = "needs a CUDA device, and torch.cuda.is_available() is False"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-required",
        action="store_true",
        help="fail at once, instead of skipping the tests marked gpu, if there is no CUDA device",
    )
    parser.addoption(
        "--amp",
        choices=["mezzo", "torch"],
        default="mezzo",
        help="whose autocast and scaler the tests in tests/torch/faults use; with torch, each of them is to fail",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("--gpu-required") and not _has_gpu():
        msg = f"--gpu-required was given: the session {NO_GPU}. Run it on a machine with an NVIDIA GPU."
        raise pytest.UsageError(msg)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow_files_first(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def _has_gpu() -> bool:
    if not find_spec("torch"):  # `make test-jax VERSION=...` runs without PyTorch
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module", autouse=True)
def _fresh_tokens(request: pytest.FixtureRequest) -> None:
    """Give a module that compiles all tokens: the files that a process runs use more policies than it may compile under."""
    source = Path(request.module.__file__).read_text(encoding="utf-8")
    # Where nobody has imported them, none is taken; some tests run without mezzo.
    if "mezzo.torch.tokens" in sys.modules and any(
        word in source for word in ("torch.compile", "torch.export", "make_fx")
    ):
        import torch

        from mezzo.torch.tokens import start_over

        torch.compiler.reset()
        start_over()


@pytest.fixture(autouse=True)
def _autocast_state_stays() -> Iterator[None]:
    """Fail the test that leaves autocast state behind, and put the state right for the next one."""
    before = jax_state.configuration()
    tensorplay_before = tensorplay_state.snapshot()
    yield
    left = jax_state.left_behind(before) | tensorplay_state.left_behind(tensorplay_before)
    jax_state.put_back(before)
    tensorplay_state.put_back()
    # A test that never imported PyTorch cannot have changed its state, and should not pay for importing it.
    if "torch" in sys.modules:
        left |= _leaked_state()
        _reset_state()
    assert left == {}, f"the test left autocast state behind: {left}"


def _keys_of_watching() -> list[str]:
    """Name the dispatch keys that are not as they were: what watches includes one, and excludes others for itself."""
    import torch

    parse, includes = torch._C._dispatch_key_parse, torch._C._dispatch_tls_is_dispatch_key_included
    found = [name for name in ("TESTING_ONLY_GenericMode",) if includes(parse(name))]
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    return found + [name for name in ("Python", "PythonTLSSnapshot", "AutogradFunctionality") if excluded(parse(name))]


def _leaked_state() -> dict[str, object]:
    import torch

    torch.autocast_increment_nesting()
    found: dict[str, object] = {
        "nesting": torch.autocast_decrement_nesting(),
        "cache flag": torch.is_autocast_cache_enabled(),
        "cpu enabled": torch.is_autocast_enabled("cpu"),
        "cpu dtype": torch.get_autocast_dtype("cpu"),
        "cuda enabled": torch.is_autocast_enabled("cuda"),
        "cuda dtype": torch.get_autocast_dtype("cuda"),
        **_accelerator_state(),
        "tokens": [device for device in ("maia", "ipu", "xla") if torch.is_autocast_enabled(device)],
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "dispatch keys": _keys_of_watching(),
        "global module hooks": bool(torch.nn.modules.module._has_any_global_hook()),
        **_policies(),
    }
    clean = {
        "nesting": 0,
        "cache flag": True,
        "cpu enabled": False,
        "cpu dtype": torch.bfloat16,
        "cuda enabled": False,
        "cuda dtype": torch.float16,
        "accelerator enabled": False,
        "accelerator dtype": torch.float16,
        "accelerator policy": None,
        "tokens": [],
        "dispatch modes": 0,
        "dispatch keys": [],
        "global module hooks": False,
        "default policy": "default",
        "active policy": "torch",
        "kept casts": 0,
        "region policy": None,
    }
    return {name: value for name, value in found.items() if value != clean[name]}


def _accelerator() -> str | None:
    """Name the accelerator that the tests have plugged into PyTorch, if any."""
    import torch

    name = torch._C._get_privateuse1_backend_name()
    return None if name == "privateuseone" else name


def _accelerator_state() -> dict[str, object]:
    import torch

    name = _accelerator()
    if name is None:
        return {}
    found: dict[str, object] = {
        "accelerator enabled": torch.is_autocast_enabled(name),
        "accelerator dtype": torch.get_autocast_dtype(name),
    }
    if "mezzo.torch" in sys.modules:
        from mezzo.torch.active import slot_for

        found["accelerator policy"] = slot_for(name).active
    return found


def _policies() -> dict[str, object]:
    if "mezzo.torch" not in sys.modules:
        return {}
    from mezzo.torch import active_policy, get_default_policy
    from mezzo.torch.active import slot_for
    from mezzo.torch.cache import casts_of_thread

    return {
        "default policy": get_default_policy().name,
        "active policy": active_policy("cpu").name,
        "kept casts": len(casts_of_thread()),
        "region policy": slot_for("cpu").active,
    }


def _reset_state() -> None:
    import torch

    _reset_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(True)
    accelerator = _accelerator()
    others = () if accelerator is None else ((accelerator, torch.float16),)
    for device, dtype in (("cpu", torch.bfloat16), ("cuda", torch.float16), *others):
        torch.set_autocast_enabled(device, False)
        torch.set_autocast_dtype(device, dtype)
    if "mezzo.torch" in sys.modules:
        _reset_policies()


def _reset_policies() -> None:
    from mezzo.torch import set_default_policy
    from mezzo.torch.active import slot_for

    set_default_policy(None)
    for device in filter(None, ("cpu", "cuda", _accelerator())):
        slot = slot_for(device)
        slot.observe(None)
        slot.outer = None
        slot.leave(None)


def _reset_nesting() -> None:
    import torch

    torch.autocast_increment_nesting()
    nesting = torch.autocast_decrement_nesting()
    for _ in range(abs(nesting)):
        (torch.autocast_decrement_nesting if nesting > 0 else torch.autocast_increment_nesting)()
