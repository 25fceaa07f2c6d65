"""The built-in tables as data: which op has which cast policy on which device, per framework.

The CSV files beside this module are the data; nothing is computed here and no framework is imported. For PyTorch:

* ``cpu cuda xpu mps mtia maia``: what PyTorch itself registers for that device (read off 2.13, held by a test);
* ``reference``: the list that PyTorch's accelerator guide gives to authors of new backends;
* ``repairs.csv``: the ops of which some call fails over dtypes, so that a policy with repairs has to look after them;
* ``apex-o1``: the op lists of Apex's O1, each row with the list and the name that it comes from;
* ``ops.csv``: every aten op with the traits a policy needs; ``aliases.csv``: Python names and the ops they reach.

For JAX:

* ``xla``: mezzo's rule for every primitive, the same on every device; the column ``float16`` is the rule in a float16
  region where that differs;
* ``ops.csv``: every primitive with its traits (held against the installed JAX by a test); ``aliases.csv``: the names of
  functions and the primitives as which they are traced, in the column ``inside`` if that is a composition.

For TensorPlay, whose ops have no overloads here:

* ``cpu cuda``: what TensorPlay itself casts on that device; the column ``origin`` is ``native`` if the op has an autocast
  kernel, and ``inside`` if it is composed of such ops in C++, where mezzo casts nothing;
* ``unified``: PyTorch's tables for the CPU and for CUDA, brought together on TensorPlay's names;
* ``repairs.csv``, ``ops.csv`` and ``aliases.csv``: as for PyTorch; an alias without ops is a composition in Python.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from mezzo.decision import CastPolicy
from mezzo.errors import DeviceError, PolicyError, near

__all__ = [
    "apex_lists",
    "device_table",
    "devices",
    "differing",
    "frameworks",
    "lacking",
    "own_kernels",
    "promoted_first",
    "read",
    "repair_kinds",
    "repairs",
    "unified",
]

_DEVICES = {
    "torch": ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "reference"),
    # XLA compiles for all of JAX's devices, and a traced function does not know yet on which of them it will run.
    "jax": ("xla",),
    "tensorplay": ("cpu", "cuda"),
}

_ELSEWHERE = {
    "hpu": "its table ships with Intel Gaudi's PyTorch plugin, which also lets LOWER_LIST and FP32_LIST replace it",
    "xla": "its table ships with torch_xla",
    "ipu": "its table shipped with Graphcore's PopTorch",
}

# PyTorch has one device type for the GPUs of both makers, and "gpu" would otherwise be taken for a slip of "cpu".
_WITHOUT_AUTOCAST = frozenset({"mtia", "maia", "xpu", "hpu", "mps", "xla"})
_CALLED_CUDA = frozenset({"gpu", "nvidia", "rocm", "hip", "amd"})


def frameworks() -> tuple[str, ...]:
    """Name the frameworks that have tables.

    Returns:
        Their names, as ``Policy(framework=...)`` takes them.

    Example:
        >>> "torch" in frameworks()
        True
    """
    return tuple(_DEVICES)


def devices(framework: str = "torch") -> tuple[str, ...]:
    """Name the devices that have a built-in table.

    Args:
        framework: A name from `frameworks`.

    Returns:
        Device names; ``"reference"`` is PyTorch's list for accelerators that are plugged in. JAX has one table, ``"xla"``.

    Raises:
        PolicyError: There are no tables for this framework.

    Example:
        >>> devices()[:2]
        ('cpu', 'cuda')
    """
    if framework not in _DEVICES:
        msg = f"mezzo has no op tables for framework {framework!r}; allowed are {', '.join(_DEVICES)}."
        raise PolicyError(msg)
    return _DEVICES[framework]


def read(framework: str, name: str) -> Iterator[dict[str, str]]:
    """Read one CSV file of a framework, row by row.

    Args:
        framework: A name from `frameworks`.
        name: The file's name without its ending.

    Yields:
        A mapping from column name to cell.
    """
    with files(__name__).joinpath(framework, f"{name}.csv").open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


@cache
def _rows(framework: str, device: str) -> Mapping[str, str]:
    if device not in devices(framework):
        raise DeviceError(_no_table(framework, device))
    return MappingProxyType({row["op"]: row["policy"] for row in read(framework, device)})


def _no_table(framework: str, device: str) -> str:
    known = devices(framework)
    name = "cuda" if device.lower() in _CALLED_CUDA else device.lower()
    why, hint = "there is no such table", near(name, known, count=1 if name in known else 3)
    if framework == "jax":
        why, hint = "its tables are for whatever XLA compiles for, and depend on no device", ""
    elif device in _ELSEWHERE and framework == "torch":
        why, hint = f"{_ELSEWHERE[device]}, so mezzo has none to show", ""
    elif device in _WITHOUT_AUTOCAST and framework == "tensorplay":
        why, hint = "TensorPlay has autocast on the CPU and on CUDA only", ""
    return f"no built-in table for device {device!r}: {why}. Allowed are {', '.join(known)}.{hint}"


@cache
def device_table(device: str, framework: str = "torch") -> Mapping[str, CastPolicy]:
    """Give the table that the framework itself applies on a device; for JAX, which has none, mezzo's.

    TensorPlay's has the composites, too, inside which TensorPlay would cast.

    Args:
        device: A name from `devices`.
        framework: A name from `frameworks`.

    Returns:
        A read-only mapping from op name to cast policy, in a bfloat16 region; see `differing` for float16.

    Raises:
        DeviceError: The device has no table here; for hpu, xla and ipu the message says who ships it.

    Example:
        >>> device_table("cpu")["aten::mm"]
        <CastPolicy.LOWER_PRECISION_FP: 'lower_precision_fp'>
    """
    rows = _rows(framework, device)
    return MappingProxyType({op: CastPolicy(policy) for op, policy in rows.items() if policy != "own"})


@cache
def differing(device: str, framework: str = "torch") -> Mapping[str, CastPolicy]:
    """Give the rules of a table that are others in a float16 region than in a bfloat16 region.

    Args:
        device: A name from `devices`.
        framework: A name from `frameworks`.

    Returns:
        A read-only mapping from op name to the cast policy in a float16 region; empty for PyTorch's tables.

    Raises:
        DeviceError: The device has no table.

    Example:
        >>> dict(differing("xla", "jax"))["erfc"]
        <CastPolicy.FP32: 'fp32'>
    """
    _rows(framework, device)
    other = {row["op"]: row.get("float16") for row in read(framework, device)}
    return MappingProxyType({op: CastPolicy(policy) for op, policy in other.items() if policy})


def own_kernels(device: str, framework: str = "torch") -> frozenset[str]:
    """Name the ops for which the device has a kernel that no cast policy describes.

    On CUDA that is ``aten::_cudnn_rnn``: PyTorch's kernel casts to float16, whatever the region's dtype, and re-flattens
    the weights into one buffer. It stays PyTorch's own unless a policy names the op.

    Args:
        device: A name from `devices`.
        framework: A name from `frameworks`.

    Returns:
        Op names.

    Example:
        >>> sorted(own_kernels("cuda"))
        ['aten::_cudnn_rnn']
    """
    return frozenset(op for op, policy in _rows(framework, device).items() if policy == "own")


@cache
def unified(framework: str) -> Mapping[str, CastPolicy]:
    """Give one table for all devices, where a framework has such a table as data.

    Args:
        framework: A name from `frameworks`.

    Returns:
        A read-only mapping from op name to cast policy: for TensorPlay the rules of PyTorch's tables on TensorPlay's ops;
        empty for the others.

    Example:
        >>> unified("tensorplay")["mm"]
        <CastPolicy.LOWER_PRECISION_FP: 'lower_precision_fp'>
    """
    devices(framework)
    if framework != "tensorplay":
        return MappingProxyType({})
    return MappingProxyType({row["op"]: CastPolicy(row["policy"]) for row in read(framework, "unified")})


@cache
def apex_lists() -> Mapping[str, CastPolicy]:
    """Give the op lists of Apex's opt level O1, on the ops of PyTorch 2.13.

    The column ``apex`` of ``torch/apex-o1.csv`` says which list and Python names a row stands for, such as ``FP32 F.gelu``;
    a name of the ``torch`` lists stands for the method of `torch.Tensor` of that name too. Rows that are ``not listed`` are
    functions that Apex left alone, and which would otherwise follow the rules of the ops inside of them.

    Returns:
        A read-only mapping from canonical op name to cast policy.

    Example:
        >>> apex_lists()["aten::gelu"], apex_lists()["aten::einsum"]
        (<CastPolicy.FP32: 'fp32'>, <CastPolicy.FALLTHROUGH: 'fallthrough'>)

    Source: ``apex/amp/lists`` of NVIDIA's Apex, before ``apex.amp`` was removed in May 2025.
    """
    return MappingProxyType({row["op"]: CastPolicy(row["policy"]) for row in read("torch", "apex-o1")})


@cache
def repairs(framework: str = "torch") -> frozenset[str]:
    """Name the ops of which some call fails over dtypes, where a policy with repairs mends it.

    Args:
        framework: A name from `frameworks`.

    Returns:
        Canonical op names, as they were measured on the CPU; none for JAX.

    Example:
        >>> "aten::index_put_" in repairs()
        True
    """
    return frozenset(row["op"] for row in _repair_rows(framework))


@cache
def repair_kinds(framework: str = "torch") -> Mapping[str, str]:
    """Give the kind of repair of each op that has one.

    Args:
        framework: A name from `frameworks`.

    Returns:
        A read-only mapping from canonical op name to ``"promote"`` (a call that fails is made again in the widest of its
        dtypes), ``"promote first"`` (see `promoted_first`) or ``"destination"`` (the op writes into an argument, whose
        dtype decides). An op that only lacks kernels is left out.

    Example:
        >>> repair_kinds("tensorplay")["layer_norm"]
        'promote first'
    """
    return MappingProxyType({row["op"]: row["repair"] for row in _repair_rows(framework) if row["repair"]})


def promoted_first(framework: str = "torch") -> frozenset[str]:
    """Name the ops of which a mixed call works, but wrongly or only until its backward pass, so that it is promoted first.

    Args:
        framework: A name from `frameworks`.

    Returns:
        Canonical op names; none for JAX.

    Example:
        >>> promoted_first() <= repairs()
        True
    """
    return frozenset(op for op, kind in repair_kinds(framework).items() if kind == "promote first")


@cache
def lacking(framework: str = "torch") -> Mapping[str, frozenset[str]]:
    """Name the lower-precision dtypes for which an op has no kernel on the CPU, forward or backward.

    Args:
        framework: A name from `frameworks`.

    Returns:
        A read-only mapping from canonical op name to dtype names; an op that has kernels for both is left out, and so is
        every op of JAX.

    Example:
        >>> sorted(lacking("torch")["aten::_linalg_solve_ex"])
        ['bfloat16', 'float16']
    """
    return MappingProxyType(
        {row["op"]: frozenset(row["lacks"].split()) for row in _repair_rows(framework) if row["lacks"]}
    )


@cache
def _repair_rows(framework: str) -> tuple[dict[str, str], ...]:
    devices(framework)
    # JAX traces a function before autocast changes it, so that no call can fail over the dtypes of a region.
    return () if framework == "jax" else tuple(read(framework, "repairs"))
