"""Registering an accelerator in processes that come in different states: what is there stays, what is wrong is said.

PyTorch has one place for such a backend, and a process can claim it once; so each state has a process of its own. The
backend of most of them is a bare name and a module. What happens to tensors is tested in tests/accelerator, on a device
that computes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PREAMBLE = """
import threading, types, warnings
import torch, mezzo, mezzo.torch
from mezzo.torch import register_accelerator, register_kernel, accelerator_policy

LOW = [torch.float16, torch.bfloat16]
KEY = torch._C.DispatchKey.AutocastPrivateUse1
SCALING = ("aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_update_scale_")

def kernels(key="AutocastPrivateUse1"):
    return set(torch._C._dispatch_get_registrations_for_dispatch_key(key))

def refused(kind, part, function, *args, **kwargs):
    before = kernels(), kernels("PrivateUse1"), torch._C._dispatch_has_backend_fallback(KEY)
    try:
        function(*args, **kwargs)
    except kind as error:
        assert part in str(error), error
    else:
        raise AssertionError(f"not refused: {args} {kwargs}")
    assert before == (kernels(), kernels("PrivateUse1"), torch._C._dispatch_has_backend_fallback(KEY))

def rename(**functions):
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", types.SimpleNamespace(**functions))
"""


def run(script: str, *, where: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PREAMBLE + script],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=where,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_names_modules_and_dtypes_that_cannot_be_are_refused_and_leave_nothing_behind() -> None:
    run("""
refused(mezzo.DeviceError, "torch.utils.rename_privateuse1_backend('npu')", register_accelerator, "npu", dtypes=LOW)
refused(mezzo.DeviceError, "rename_privateuse1_backend('npu')", register_kernel, "npu", "mm", "fp32")
refused(mezzo.DeviceError, "no autocast table has been registered for 'npu'", accelerator_policy, "npu")
torch.utils.rename_privateuse1_backend("npu")
refused(mezzo.RegistrationError, "torch._register_device_module('npu', module)", register_accelerator, "npu", dtypes=LOW)
torch._register_device_module("npu", types.SimpleNamespace())

refused(mezzo.DeviceError, "which is called 'npu'. A process can have one.", register_accelerator, "tpu", dtypes=LOW)
refused(mezzo.DeviceError, "without an index", register_accelerator, "npu:0", dtypes=LOW)
refused(mezzo.DeviceError, "as a string", register_accelerator, torch.device("npu"), dtypes=LOW)
refused(mezzo.DeviceError, "mezzo.torch.autocast('cuda', policy=...)", register_accelerator, "cuda", dtypes=LOW)
refused(mezzo.DeviceError, "mezzo.torch.autocast('cpu', policy=...)", register_kernel, "cpu", "mm", "fp32")

register = lambda **given: register_accelerator("npu", **{"dtypes": LOW, **given})
refused(mezzo.DtypeError, "torch.int8 is not one", register, dtypes=[torch.float16, torch.int8])
refused(mezzo.DtypeError, "torch.complex64 is not one", register, dtypes=[torch.complex64])
refused(mezzo.DtypeError, "'float16' is not one", register, dtypes=["float16"])
refused(mezzo.DtypeError, "must be a list of dtypes", register, dtypes=torch.float16)
refused(mezzo.DtypeError, "must be a list of dtypes", register, dtypes="float16")
refused(mezzo.DtypeError, "dtypes is empty", register, dtypes=[])
refused(mezzo.DtypeError, "give one of them as default_dtype", register, dtypes=[torch.bfloat16])
refused(mezzo.DtypeError, "must be one of the dtypes (torch.float16, torch.bfloat16)", register, default_dtype=torch.float32)
refused(mezzo.PolicyError, "leaves ops to the device's own table", register, policy="default")
refused(mezzo.PolicyError, "leaves ops to the device's own table", register, policy=mezzo.Policy("mine", default="device"))
refused(mezzo.UnknownPolicyError, "'referense' is no built-in policy", register, policy="referense")
refused(mezzo.UnknownOpError, "nothing of that name is registered", register,
        policy=mezzo.Policy("x", {"nolib::op": "fp32"}))
refused(mezzo.PolicyError, "must be a Policy", register, policy={"mm": "fp32"})
refused(mezzo.PolicyError, "existing must be 'error', 'keep' or 'replace', got True", register, existing=True)

refused(mezzo.UnknownOpError, "is no op", register_kernel, "npu", "matmull", "fp32")
refused(mezzo.PolicyError, "half", register_kernel, "npu", "mm", "half")
refused(mezzo.PolicyError, "no optional dtype argument", register_kernel, "npu", "mm", "fp32_set_opt_dtype")
refused(mezzo.PolicyError, "no overload with a dtype", register_kernel, "npu", "mm", "fp32_append_dtype")
refused(mezzo.PolicyError, "writes into an argument", register_kernel, "npu", "add_", "promote")
refused(mezzo.PolicyError, "existing must be", register_kernel, "npu", "mm", "fp32", existing="ignore")
assert not hasattr(torch.npu, "get_amp_supported_dtype")
assert torch.get_autocast_dtype("npu") is torch.float16
assert not kernels() and not torch._C._dispatch_has_backend_fallback(KEY)
""")


def test_all_that_a_bare_backend_lacks_is_supplied_and_a_second_call_changes_it() -> None:
    run("""
rename()
register_accelerator("npu", dtypes=LOW)
table = mezzo.builtin_policy("reference")
assert accelerator_policy("npu") == table
assert kernels() == set(table.ops)
assert torch._C._dispatch_has_backend_fallback(KEY)
assert all(torch._C._dispatch_has_kernel_for_dispatch_key(op, "PrivateUse1") for op in SCALING)
assert torch.npu.get_amp_supported_dtype() == LOW
assert KEY in torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS

found = kernels(), kernels("PrivateUse1")
for _ in range(3):
    register_accelerator("npu", dtypes=LOW)
assert found == (kernels(), kernels("PrivateUse1"))

register_accelerator("npu", dtypes=[torch.bfloat16, torch.float32], policy="fp32", default_dtype=torch.bfloat16)
assert torch.npu.get_amp_supported_dtype() == [torch.bfloat16, torch.float32]
assert accelerator_policy("npu").rule("mm.default") == "fp32"
refused(mezzo.DtypeError, "compute in the default, torch.bfloat16", register_accelerator, "npu", dtypes=[torch.float16])
assert torch.npu.get_amp_supported_dtype() == [torch.bfloat16, torch.float32]
refused(mezzo.UnknownOpError, "", register_accelerator, "npu", dtypes=LOW, policy=mezzo.Policy("x", {"nolib::op": "fp32"}))
assert torch.npu.get_amp_supported_dtype() == [torch.bfloat16, torch.float32]
assert accelerator_policy("npu").rule("mm.default") == "fp32"

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    region = torch.autocast("npu", dtype=torch.float16)
assert not region._enabled and "npu Autocast only supports dtypes of torch.bfloat16, torch.float32" in str(caught[0].message)
assert torch.autocast("npu").fast_dtype is torch.bfloat16
""")


def test_the_default_dtype_is_found_in_every_thread_where_nobody_has_set_another() -> None:
    run("""
rename()
register_accelerator("npu", dtypes=LOW, default_dtype=torch.bfloat16)
assert torch.get_autocast_dtype("npu") is torch.bfloat16
assert mezzo.torch.autocast("npu").fast_dtype is torch.bfloat16
found = []

def untouched():
    found.append(torch.get_autocast_dtype("npu"))
    found.append(mezzo.torch.autocast("npu").fast_dtype)
    found.append(torch.get_autocast_dtype("npu"))
    torch.set_autocast_dtype("npu", torch.float16)
    found.append(mezzo.torch.autocast("npu").fast_dtype)

def given():
    found.append(mezzo.torch.autocast("npu", dtype=torch.float16).fast_dtype)

for work in (untouched, given):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
assert found == [torch.float16, torch.bfloat16, torch.bfloat16, torch.float16, torch.float16], found
torch.set_autocast_dtype("npu", torch.float16)
register_accelerator("npu", dtypes=LOW, default_dtype=torch.bfloat16)
assert torch.get_autocast_dtype("npu") is torch.float16  # the user's own choice
""")


def test_what_the_backend_brings_in_python_is_kept() -> None:
    run("""
rename(get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16])
own = torch.npu.get_amp_supported_dtype
fallback = torch.library.Library("_", "IMPL")
fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
ops = torch.library.Library("aten", "IMPL")
ran = []
ops.impl("mm", lambda *args: ran.append("mm"), "AutocastPrivateUse1")
ops.impl("_amp_update_scale_", lambda scale, *rest: ran.append("scale"), "PrivateUse1")

refused(mezzo.DtypeError, "says torch.bfloat16, torch.float16, and dtypes says torch.float16. The backend's own function",
        register_accelerator, "npu", dtypes=[torch.float16])
refused(mezzo.RegistrationError, "1 of the ops (aten::mm)", register_accelerator, "npu", dtypes=LOW)
refused(mezzo.RegistrationError, "existing='replace'", register_kernel, "npu", "mm", "fp32")
register_accelerator("npu", dtypes=LOW, existing="keep")
assert torch.npu.get_amp_supported_dtype is own
assert "aten::mm" not in accelerator_policy("npu").ops and "aten::bmm" in accelerator_policy("npu").ops
assert mezzo.torch.kernels.installed_kernels("npu") == set(accelerator_policy("npu").ops)
assert len(kernels()) == len(mezzo.builtin_policy("reference").ops)
register_accelerator("npu", dtypes=LOW, existing="keep")
assert "aten::mm" not in accelerator_policy("npu").ops

refused(mezzo.RegistrationError, "1 of the ops (aten::mm)", register_accelerator, "npu", dtypes=LOW)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    register_accelerator("npu", dtypes=LOW, existing="replace")
assert accelerator_policy("npu") == mezzo.builtin_policy("reference")
register_accelerator("npu", dtypes=LOW)  # mezzo's by now
register_kernel("npu", "mm", "fp32")
assert accelerator_policy("npu").rule("mm.default") == "fp32"
""")


def test_kernels_can_be_registered_one_by_one_as_the_guide_does() -> None:
    run("""
rename(get_amp_supported_dtype=lambda: LOW)
register_kernel("npu", "mm", "lower_precision_fp")
assert torch._C._dispatch_has_backend_fallback(KEY)
register_kernel("npu", "aten::sum.dim_IntList", "fp32_set_opt_dtype")
register_kernel("npu", "norm", "fp32_append_dtype")
register_kernel("npu", "cat", "promote")
register_kernel("npu", "asin", {"float16": "fp32", "bfloat16": "fallthrough"})
assert kernels() == {"aten::mm", "aten::mm.dtype", "aten::sum.dim_IntList", "aten::norm.Scalar", "aten::norm.ScalarOpt_dim",
                     "aten::cat", "aten::asin"}, kernels()
assert accelerator_policy("npu").rule("asin", "float16") == "fp32"
assert accelerator_policy("npu").name == "npu"
register_accelerator("npu", dtypes=LOW)
assert accelerator_policy("npu") == mezzo.builtin_policy("reference")
assert kernels() >= set(accelerator_policy("npu").ops)
""")


def test_modules_that_take_or_give_nothing_are_named() -> None:
    run("""
class Module:
    __slots__ = ()
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", Module())
refused(mezzo.RegistrationError, "torch.npu has no get_amp_supported_dtype() and takes none", register_accelerator, "npu",
        dtypes=LOW)
for wrong in (None, torch.float16, ["float16"]):
    torch.npu = types.SimpleNamespace(get_amp_supported_dtype=lambda wrong=wrong: wrong)
    refused(mezzo.RegistrationError, f"must return a list of dtypes, as PyTorch's guide says; it returned {wrong!r}",
            register_accelerator, "npu", dtypes=LOW)
torch.npu = types.SimpleNamespace(get_amp_supported_dtype=None)
refused(mezzo.RegistrationError, "must be a function that returns a list of dtypes, and is None", register_accelerator,
        "npu", dtypes=LOW)
assert torch.npu.get_amp_supported_dtype is None
torch.npu = types.SimpleNamespace(get_amp_supported_dtype=lambda: (dtype for dtype in (torch.bfloat16, torch.float16)))
register_accelerator("npu", dtypes=LOW)
""")


def test_a_backend_that_keeps_pytorchs_name() -> None:
    run("""
torch._register_device_module("privateuseone", types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1))
register_accelerator("privateuseone", dtypes=LOW)
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    x = torch.empty(2, 2, device="privateuseone:0")
    for region in (torch.autocast, mezzo.torch.autocast):
        with region("privateuseone"):
            assert (x @ x).dtype is torch.float16
""")


def test_a_backend_with_the_name_of_a_table_follows_its_own() -> None:
    run("""
torch.utils.rename_privateuse1_backend("reference")
torch._register_device_module("reference", types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1))
register_accelerator("reference", dtypes=LOW)
register_accelerator("reference", dtypes=LOW, policy=mezzo.Policy("mine", {"mm": "lower_precision_fp"}))
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode(), torch.autocast("reference"):
    assert torch.exp(torch.empty(2, 2, device="reference:0", dtype=torch.float16)).dtype is torch.float16
""")


def test_other_devices_are_not_touched() -> None:
    """What decides the cost for programs on the CPU and on CUDA: which kernels are there, and what is hooked."""
    run("""
from torch.optim import optimizer
devices = ("CPU", "CUDA", "AutocastCPU", "AutocastCUDA", "AutocastIPU", "AutogradCPU", "AutogradCUDA", "Meta")
def seen():
    return [kernels(key) for key in devices], torch.clear_autocast_cache, dict(optimizer._global_optimizer_post_hooks), (
        torch.amp.autocast_mode.autocast.__init__, torch._C._dispatch_has_backend_fallback(torch._C.DispatchKey.AutocastCPU),
        torch._C._dispatch_tls_local_include_set().raw_repr())
before = seen()
rename()
register_accelerator("npu", dtypes=LOW)
register_kernel("npu", "relu", "fp32")
with torch.autocast("cpu"):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
assert before == seen()
""")


CPP = r"""
#include <ATen/autocast_mode.h>
#include <torch/library.h>

static at::Tensor mm(const at::Tensor& a, const at::Tensor& b) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  return at::mm(a.to(at::kBFloat16), b.to(at::kBFloat16));
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) { m.impl("mm", mm); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
"""

CPP_SCRIPT = """
import sys
sys.path.insert(0, {examples!r})
from torch.utils import cpp_extension
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    cpp_extension.load(name="backend", sources=["backend.cpp"], build_directory=".", is_python_module=False,
                       extra_cflags=["-O0"])
import standin_backend
torch.standin.get_amp_supported_dtype = lambda: LOW
x = torch.ones(2, 2, device="standin")
nothing_registered = mezzo.torch.kernels.installed_kernels("standin")

def products(policy=None):
    with mezzo.torch.autocast("standin", dtype=torch.float16, policy=policy):
        return torch.mm(x, x).dtype, torch.bmm(x[None], x[None]).dtype

# Left alone, with the repairs of the default policy too; only what a policy names is mezzo's.
with torch.autocast("standin"):
    assert torch.mm(x, x).dtype is torch.bfloat16
assert products() == products("torch") == (torch.bfloat16, torch.float32)
assert "aten::mm" not in mezzo.torch.kernels.installed_kernels("standin")
assert products(mezzo.Policy("bmm", {{"bmm": "lower_precision_fp"}}, default="device")) == (torch.bfloat16, torch.float16)
assert products("fp32") == (torch.float32, torch.float32)
# From now on mezzo's kernel is in front; where no policy says otherwise it hands on.
assert products() == products("torch") == (torch.bfloat16, torch.float32)
with torch.autocast("standin"):
    assert torch.mm(x, x).dtype is torch.bfloat16

refused(mezzo.RegistrationError, "1 of the ops (aten::mm)", register_accelerator, "standin", dtypes=LOW)
register_accelerator("standin", dtypes=LOW, existing="keep")
assert products() == (torch.bfloat16, torch.float16)
with torch.autocast("standin"):
    assert torch.mm(x, x).dtype is torch.bfloat16
register_accelerator("standin", dtypes=LOW, existing="replace")
assert products() == (torch.float16, torch.float16)
with torch.autocast("standin"):
    assert torch.mm(x, x).dtype is torch.float16
register_accelerator("standin", dtypes=LOW, policy=mezzo.Policy("bmm", {{"bmm": "lower_precision_fp"}}))
assert products() == (torch.bfloat16, torch.float16)  # its own again
"""


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("c++") is None or shutil.which("ninja") is None, reason="needs a C++ compiler and ninja"
)
def test_kernels_in_cpp_are_left_alone_but_where_a_policy_differs(tmp_path: Path) -> None:
    (tmp_path / "backend.cpp").write_text(CPP)
    examples = Path(__file__).resolve().parents[2] / "examples"
    run(CPP_SCRIPT.format(examples=str(examples)), where=tmp_path)
