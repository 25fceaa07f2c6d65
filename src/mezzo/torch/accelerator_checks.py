"""What `mezzo.torch.register_accelerator` takes, and what it says to anything else."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mezzo.errors import DeviceError, DtypeError, PolicyError
from mezzo.policy import DEVICE, Policy
from mezzo.torch.backends import as_table

__all__ = ["check_default", "check_dtypes", "check_existing", "check_name", "check_policy"]


def check_name(name: object) -> None:
    """Refuse a name that is not that of the process's PrivateUse1 backend.

    Raises:
        DeviceError: It is not, and the message says what to do.
    """
    backend = torch._C._get_privateuse1_backend_name()
    if name == backend:
        return
    msg = f"{name!r} is not the PrivateUse1 backend of this process, which is called {backend!r}. "
    if not isinstance(name, str):
        msg += "Give its name as a string."
    elif name.partition(":")[0] == backend:
        msg += "Give its name without an index: autocast rules are for all devices of a type."
    elif _is_known(name):
        msg += (
            "PyTorch has a dispatch key for that device already: change its rules by a policy, "
            f"mezzo.torch.autocast({name!r}, policy=...) or mezzo.torch.set_default_policy(...)."
        )
    elif backend == "privateuseone":
        msg += f"Rename it first: torch.utils.rename_privateuse1_backend({name!r})."
    else:
        msg += "A process can have one."
    raise DeviceError(msg)


def _is_known(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def check_existing(existing: object) -> None:
    """Refuse what is no way to deal with kernels of the backend's own."""
    if existing not in ("error", "keep", "replace"):
        msg = f"existing must be 'error', 'keep' or 'replace', got {existing!r}."
        raise PolicyError(msg)


def check_dtypes(name: str, dtypes: object) -> tuple[torch.dtype, ...]:
    """Give the dtypes that regions may compute in, each once.

    Raises:
        DtypeError: There is none, or one is no floating-point dtype.
    """
    if isinstance(dtypes, str) or not isinstance(dtypes, Iterable):
        msg = f"dtypes must be a list of dtypes such as [torch.float16, torch.bfloat16], got {dtypes!r}."
        raise DtypeError(msg)
    listed = tuple(dtypes)
    for dtype in listed:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            msg = (
                f"autocast on {name!r} computes in floating-point dtypes, and {dtype!r} is not one; usual are torch.float16 "
                "and torch.bfloat16."
            )
            raise DtypeError(msg)
    if not listed:
        msg = f"dtypes is empty, so every region on {name!r} would be disabled; name at least one, such as torch.bfloat16."
        raise DtypeError(msg)
    return tuple(dict.fromkeys(listed))


def check_default(given: object, known: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
    """Refuse a default dtype in which every region that names none would be disabled.

    Args:
        given: What the caller passed; None for none.
        known: What is the default so far.
        allowed: The dtypes that regions may compute in.

    Raises:
        DtypeError: The default is not among them.
    """
    names = ", ".join(map(str, allowed))
    if given is None and known not in allowed:
        msg = (
            f"regions that name no dtype would compute in the default, {known}, which is not among the dtypes ({names}); "
            "give one of them as default_dtype."
        )
        raise DtypeError(msg)
    if given is not None and given not in allowed:
        msg = f"default_dtype must be one of the dtypes ({names}), got {given!r}."
        raise DtypeError(msg)


def check_policy(policy: Policy) -> Policy:
    """Give a policy that can be a device's own table: one that says all by itself, and mends nothing.

    Raises:
        PolicyError: It leaves ops to the device's own table.
    """
    if policy.default == DEVICE:
        msg = (
            f"policy {policy.name!r} leaves ops to the device's own table, and it is that table that is to be set here. "
            "Give one that stands by itself: 'reference', 'unified', 'fp32', or a Policy with another default."
        )
        raise PolicyError(msg)
    return as_table(policy) if policy.repairs else policy
