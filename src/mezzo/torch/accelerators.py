"""AMP for an accelerator that is plugged into PyTorch, from Python: what its guide asks for in C++, in one call.

PyTorch keeps a place for one backend that is not its own, PrivateUse1. To have autocast there, the backend's authors supply
a function that lists the dtypes, a fallback, and a C++ kernel for each op that is to be cast. Here all of that follows from
a policy; the casts themselves are made by mezzo's kernels (`mezzo.torch.kernels`).

The rules: https://docs.pytorch.org/docs/stable/accelerator/amp.html.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Literal

import torch

from mezzo.builtin import PolicyLike, resolve_policy
from mezzo.errors import DeviceError, RegistrationError
from mezzo.policy import Policy
from mezzo.rules import RuleLike
from mezzo.torch.accelerator_checks import check_default, check_dtypes, check_existing, check_name, check_policy
from mezzo.torch.backends import NATIVE_DEFAULT, as_table, backend_for, exact_names, remember, table
from mezzo.torch.kernels import foreign_kernels, install
from mezzo.torch.ops import autocast_key_name, expand_rules
from mezzo.torch.plans import build_plan
from mezzo.torch.policies import follow_table
from mezzo.torch.scaling_kernels import register_scaling_kernels
from mezzo.torch.supported_dtypes import supplied
from mezzo.torch.switch import let_higher_order_ops_through, let_through

__all__ = ["Existing", "accelerator_policy", "register_accelerator", "register_kernel"]

Existing = Literal["error", "keep", "replace"]
"""What to do about autocast kernels of the backend's own: see `register_accelerator`."""

_lock = threading.RLock()


def register_accelerator(
    name: str,
    *,
    dtypes: Iterable[torch.dtype],
    policy: PolicyLike = "reference",
    default_dtype: torch.dtype | None = None,
    existing: Existing = "error",
) -> None:
    """Give autocast and gradient scaling to an accelerator that is plugged into PyTorch.

    After it ``torch.autocast(name)`` and `mezzo.torch.autocast`, ``custom_fwd`` and ``custom_bwd``, both ``GradScaler``, and
    ``torch.utils.checkpoint`` work there. Call it once the backend is loaded and renamed and its module registered, from any
    thread; it is for the process. Called again it sets policy and dtypes anew, `register_kernel`'s rules included; a default
    dtype that is not given again stays. Regions that were made before follow; call it while none is open.

    What it registers, where it is missing: ``get_amp_supported_dtype`` on ``torch.<name>``; the fallback that lets other ops
    pass; a kernel for each op of the policy; kernels for ``_amp_foreach_non_finite_check_and_unscale_`` and
    ``_amp_update_scale_``, which gradient scaling needs.

    Args:
        name: The name to which the PrivateUse1 backend was renamed.
        dtypes: The floating-point dtypes in which regions may compute, usually float16 and bfloat16. A region of another one
            warns and is disabled. If ``torch.<name>`` has a ``get_amp_supported_dtype`` already, that one stays, and
            ``dtypes`` must say the same.
        policy: Which op runs in which dtype, in plain regions and wherever a region's policy leaves it to the device:
            ``"reference"`` (the list that PyTorch recommends to backends), ``"unified"``, ``"fp32"``, a table's name such as
            ``"cuda"``, a `mezzo.Policy`, or the path of a TOML file. Its ``repairs`` have no effect.
        default_dtype: The dtype of regions that name none; by default PyTorch's float16. It is set in the calling thread,
            and in other threads when they make their first region of mezzo's: PyTorch keeps it per thread, and a plain
            ``torch.autocast`` in a thread without one finds float16.
        existing: What to do about ops of the policy for which the backend has an autocast kernel of its own: ``"error"``,
            ``"keep"`` it, or ``"replace"`` it by the policy's rule. Ops that the policy does not name keep theirs anyway.

    Raises:
        DeviceError: The PrivateUse1 backend of this process is not called ``name``.
        DtypeError: A dtype is not a floating-point one, the default is none of them, or they are not those that the backend
            itself says.
        PolicyError: The policy leaves ops to the device's own table, which is what this call is to set, or has a rule that
            does not fit an op.
        UnknownOpError: The policy names an op that PyTorch does not have.
        RegistrationError: There is no module ``torch.<name>``, its own function gives no dtypes, or the backend has kernels
            of its own for ops of the policy. Nothing is registered then.

    Example:
        >>> import torch
        >>> from mezzo.torch import register_accelerator
        >>> torch.utils.rename_privateuse1_backend("npu")  # doctest: +SKIP
        >>> torch._register_device_module("npu", npu_module)  # doctest: +SKIP
        >>> register_accelerator("npu", dtypes=[torch.float16, torch.bfloat16])  # doctest: +SKIP
        >>> register_accelerator("cuda", dtypes=[torch.float16])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        mezzo.errors.DeviceError: 'cuda' is not the PrivateUse1 backend of this process, ...
    """
    check_name(name)
    check_existing(existing)
    allowed = check_dtypes(name, dtypes)
    wanted = check_policy(resolve_policy(policy))
    with _lock:
        known = backend_for(name)
        check_default(default_dtype, (known and known.default_dtype) or NATIVE_DEFAULT, allowed)
        with supplied(name, allowed):
            _put_in_force(name, wanted, _all_ops(wanted), existing, default_dtype)
            register_scaling_kernels()


def register_kernel(backend: str, op: str, cast_policy: RuleLike, *, existing: Existing = "error") -> None:
    """Set the autocast rule of one op on an accelerator that is plugged into PyTorch.

    What ``KERNEL_PRIVATEUSEONE(op, overload, cast_policy)`` does in C++. Works with or without a `register_accelerator`
    before it, and may be called again for the same op. Thread-safe; call it while no region is open.

    Args:
        backend: The name to which the PrivateUse1 backend was renamed.
        op: An op or an overload: ``"mm"``, ``"aten::sum.dim_IntList"``, ``"mylib::op"``. A name without an overload covers
            all overloads that the rule fits, but ``out``.
        cast_policy: ``"lower_precision_fp"``, ``"fp32"``, ``"fp32_set_opt_dtype"``, ``"fp32_append_dtype"`` (for
            ``norm``), ``"promote"``, ``"banned"`` or ``"fallthrough"``; or a mapping with one for ``"bfloat16"`` and
            ``"float16"`` regions each.
        existing: As in `register_accelerator`.

    Raises:
        DeviceError: The PrivateUse1 backend of this process is not called ``backend``.
        UnknownOpError: PyTorch has no such op.
        PolicyError: ``cast_policy`` is none, or does not fit the op.
        RegistrationError: The backend has a kernel of its own for the op.

    Example:
        >>> from mezzo.torch import register_kernel
        >>> register_kernel("npu", "norm.Scalar", "fp32_append_dtype")  # doctest: +SKIP
    """
    check_name(backend)
    check_existing(existing)
    with _lock:
        known = backend_for(backend)
        base = Policy(backend, repairs=False) if known is None else known.policy
        rules = expand_rules(Policy(backend, {op: cast_policy}).ops)
        changed = base.override(exact_names(rules), name=base.name)
        _put_in_force(backend, changed, frozenset(rules), existing, None)


def accelerator_policy(name: str) -> Policy:
    """Give the table that an accelerator follows, as set by `register_accelerator` and `register_kernel`.

    Args:
        name: Its device type.

    Returns:
        The policy; ops for which the backend has kept its own kernels are not in it.

    Raises:
        DeviceError: Nothing has been registered for this device.

    Example:
        >>> from mezzo.torch import accelerator_policy
        >>> accelerator_policy("npu").rule("softmax")  # doctest: +SKIP
        <CastPolicy.FP32_SET_OPT_DTYPE: 'fp32_set_opt_dtype'>
    """
    backend = backend_for(name)
    if backend is None:
        msg = (
            f"no autocast table has been registered for {name!r}; register_accelerator() and register_kernel() do that. For "
            f"PyTorch's own devices there is mezzo.builtin_policy(device)."
        )
        raise DeviceError(msg)
    return backend.policy


def _put_in_force(
    name: str, policy: Policy, ops: frozenset[str], existing: Existing, default_dtype: torch.dtype | None
) -> None:
    """Register what a table needs and make it the backend's.

    Args:
        name: The backend.
        policy: Its table from now on.
        ops: Those of it for which kernels of the backend's own matter.
        existing: What to do about them.
        default_dtype: As in `register_accelerator`.
    """
    known = backend_for(name)
    ruled = frozenset() if known is None else _all_ops(known.policy)
    foreign = foreign_kernels(ops, name) - ruled
    if foreign and existing == "error":
        raise RegistrationError(_conflict(name, foreign))
    if foreign and existing == "keep":
        policy = as_table(policy, without=foreign)
    # Builds every action and may so refuse the policy, before anything is registered.
    plan = build_plan(policy, name)
    key_name = autocast_key_name(name)
    key = torch._C._dispatch_key_parse(key_name)
    if torch._C._dispatch_has_backend_fallback(key):
        let_higher_order_ops_through(key)
    else:
        let_through(key_name)
    install(plan)
    remember(name, policy, default_dtype)
    follow_table(name)


def _all_ops(policy: Policy) -> frozenset[str]:
    return frozenset(table(policy, "bfloat16"))


def _conflict(name: str, foreign: frozenset[str]) -> str:
    listed = ", ".join(sorted(foreign)[:5]) + (", ..." if len(foreign) > 5 else "")
    return (
        f"the backend {name!r} has autocast kernels of its own for {len(foreign)} of the ops ({listed}). Pass "
        "existing='keep' to leave them as they are, or existing='replace' to have them follow the policy instead."
    )
