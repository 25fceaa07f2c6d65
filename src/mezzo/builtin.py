"""The policies that mezzo brings along, and how a caller's ``policy=`` becomes a `Policy`."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from typing import Final

from . import tables
from .decision import CastPolicy
from .errors import PolicyError, UnknownPolicyError, near
from .policy import Policy
from .rules import Rule, device_rules
from .vocabulary import vocabulary

__all__ = ["PolicyLike", "builtin_names", "builtin_policy", "resolve_policy"]

PolicyLike = str | Path | Policy
"""What ``policy=`` takes: a built-in name, the path of a TOML file, or a `Policy`."""

_APEX: Final = "apex-o1"
_OVERRIDING: Final = {
    "torch": "builtin_policy('default').override({'softmax': 'fp32'})",
    "jax": "builtin_policy('default', framework='jax').override({'tanh': 'fp32'})",
    "tensorplay": "builtin_policy('default', framework='tensorplay').override({'softmax': 'fp32'})",
}
_NAMES: Final = {
    "torch": ("default", "torch", "unified", "fp32", _APEX),
    "jax": ("default", "unified", "fp32"),
    "tensorplay": ("default", "tensorplay", "unified", "fp32"),
}
_OWNERS: Final = {"torch": "PyTorch", "tensorplay": "TensorPlay", _APEX: "PyTorch"}


def builtin_names(framework: str = "torch") -> tuple[str, ...]:
    """Name the built-in policies.

    Args:
        framework: For whose ops.

    Returns:
        The names that ``policy=`` takes, then those of the devices' tables.

    Example:
        >>> builtin_names()[:5]
        ('default', 'torch', 'unified', 'fp32', 'apex-o1')
    """
    devices = tables.devices(framework)
    return (*_NAMES[framework], *devices)


@cache
def builtin_policy(name: str, *, framework: str = "torch") -> Policy:
    """Give a built-in policy by name.

    Args:
        name: ``"default"``: the device's own table, and repairs where PyTorch's autocast would raise over dtypes or serve
            the stale cast of a weight. ``"torch"``: the device's own table, exactly. ``"unified"``: one table for all
            devices, the CUDA list and the entries that only the CPU list has. ``"fp32"``: every listed op in float32,
            whatever comes in. ``"apex-o1"``, for PyTorch's ops only: the lists of Apex's O1, the same on every device.
            Or a device's name, for that device's table as a policy.
        framework: For whose ops. JAX has ``"default"``, ``"unified"`` and ``"xla"``, which all have the rules of mezzo's one
            table for XLA, and ``"fp32"``: every primitive that computes in float32; ``"opaque"`` is the default of each.
            TensorPlay has ``"default"`` and ``"tensorplay"``, which is its own table, exactly, as ``"torch"`` is PyTorch's;
            ``"unified"``: the rules of PyTorch's unified table on TensorPlay's ops; ``"fp32"``, ``"cpu"`` and ``"cuda"``.

    Returns:
        The policy; the same object at every call.

    Raises:
        UnknownPolicyError: No built-in policy has this name.

    Example:
        >>> builtin_policy("unified").rule("softmax")
        <CastPolicy.FP32_SET_OPT_DTYPE: 'fp32_set_opt_dtype'>
    """
    if name not in builtin_names(framework):
        raise UnknownPolicyError(_unknown(name, framework))
    if framework == "jax":
        return _jax(name)
    if name in ("default", framework):
        return Policy(name, default="device", framework=framework, repairs=name == "default")
    if name == "unified":
        return _named("unified", _unified(framework), framework)
    if name == "fp32":
        return _named("fp32", _fp32(framework), framework)
    if name == _APEX:
        return _named(_APEX, dict(tables.apex_lists()), framework)
    return Policy.from_table(name, framework=framework)


def _unknown(name: str, framework: str) -> str:
    known = builtin_names(framework)
    if name in _OWNERS:
        return (
            f"{name!r} is for {_OWNERS[name]}'s ops, and {framework!r} has no policy of that name; ask for "
            f"framework={'tensorplay' if name == 'tensorplay' else 'torch'!r}, or for one of {', '.join(known)}."
        )
    return f"{name!r} is no built-in policy; allowed are {', '.join(known)}.{near(name, known)}"


def _jax(name: str) -> Policy:
    """JAX's functions are traced before a device is known, so "default" and "unified" are the one table there is."""
    if name == "xla":
        return Policy.from_table("xla", framework="jax")
    rules = device_rules("xla", "jax")
    if name == "fp32":
        rules |= dict.fromkeys(
            (op for op, traits in vocabulary("jax").traits.items() if "compute" in traits), CastPolicy.FP32
        )
    return Policy(name, rules, framework="jax")


def _named(name: str, rules: dict[str, Rule], framework: str) -> Policy:
    if framework == "torch":
        # A bare name without overload means all overloads, so the default overload alone has to be spelled out.
        rules = {f"{op}.default" if "." not in op else op: rule for op, rule in rules.items()}
    return Policy(name, rules, framework=framework)


def _unified(framework: str) -> dict[str, Rule]:
    if table := tables.unified(framework):
        return dict(table)
    return {**tables.device_table("cpu", framework), **tables.device_table("cuda", framework)}


def _fp32(framework: str) -> dict[str, Rule]:
    """Every op that any device lists, in float32.

    Kernels that are a device's own are named too: PyTorch's for ``_cudnn_rnn`` would run an LSTM in float16 in the midst
    of a full-precision island. binary_cross_entropy is safe in float32, so here it is not banned.
    """
    listed = [op for device in tables.devices(framework) for op in tables.device_table(device, framework)]
    listed += [op for device in tables.devices(framework) for op in tables.own_kernels(device, framework)]
    listed += tables.unified(framework)
    return dict.fromkeys(listed, CastPolicy.FP32)


@lru_cache(maxsize=32)
def _load(path: Path, changed: int) -> Policy:  # noqa: ARG001 - a file that changed is read again
    """Read a policy file once, for a region that is made in every step of a loop."""
    return Policy.load(path)


def resolve_policy(policy: PolicyLike, *, framework: str = "torch") -> Policy:
    """Turn what a caller passed as ``policy=`` into a `Policy`.

    Args:
        policy: A `Policy`, a built-in name, a path object, or a string that ends in ``.toml``.
        framework: Whose ops the policy must be about.

    Returns:
        The policy.

    Raises:
        UnknownPolicyError: The string is neither a built-in name nor a ``.toml`` path.
        PolicyError: The value is of another type, or the policy is for another framework.
        PolicyFileError: The file is not a policy.
        UnknownOpError: The file names an op that does not exist.
        FileNotFoundError: There is no such file.

    Example:
        >>> resolve_policy("fp32").name
        'fp32'
    """
    if isinstance(policy, str) and not policy.endswith(".toml"):
        try:
            found = builtin_policy(policy, framework=framework)
        except UnknownPolicyError as error:
            msg = f"{error} A policy in a file is named by a path object or a string that ends in .toml."
            raise UnknownPolicyError(msg) from None
    elif isinstance(policy, str | Path):
        found = _load(Path(policy), Path(policy).stat().st_mtime_ns)
    elif isinstance(policy, Policy):
        found = policy
    else:
        msg = (
            f"policy must be a Policy, a built-in name or the path of a .toml file, got {type(policy).__name__}. "
            f"To change single rules: {_OVERRIDING.get(framework, _OVERRIDING['torch'])}."
        )
        raise PolicyError(msg)
    if found.framework != framework:
        msg = (
            f"policy {found.name!r} is for {found.framework!r}, and this is the adapter for {framework!r}. One is made with "
            f"framework={framework!r}, in a .toml file too; builtin_policy('default', framework={framework!r}) is one."
        )
        raise PolicyError(msg)
    return found
