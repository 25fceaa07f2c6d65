"""How the ranks of a distributed run come to one decision about a step.

A gradient may be non-finite on one rank only: in one rank's shard of a DTensor, or, in a model that is merely replicated,
in one rank's own gradients. A rank that skips a step which another rank makes has other parameters, and soon another
scale, from then on. So each rank looks at its own gradients (`local`), and then the flags of all ranks are brought to
their maximum (`agree_`): over every dimension of the device meshes that the parameters live on (`meshes`), and over the
process group that the user named.

Nothing here imports `torch.distributed`: where DTensors exist, it has been imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from mezzo.errors import ScalingError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["agree_", "check_process_group", "has_partial", "is_distributed", "local", "meshes"]


_PLAIN = (Parameter, Tensor)
"""What nearly all parameters are, and no DTensor is; to ask for an instance takes longer."""


def local(gradient: Tensor) -> Tensor:
    """Give the part of a gradient that this rank holds.

    Args:
        gradient: Any tensor, of any shape and dtype.

    Returns:
        Of a DTensor its local tensor, on the same memory, so that a change in place is seen by the DTensor; it may have no
        elements. Any other tensor as it is. No autograd graph is recorded. No rank waits for another, except that a
        collective which is still to fill this tensor is waited for.

    Example:
        >>> import torch
        >>> from mezzo.torch.agreement import local
        >>> gradient = torch.ones(3)
        >>> local(gradient) is gradient
        True
    """
    # Called once per parameter and step: nearly all of them are plain.
    if type(gradient) is Tensor:
        return gradient
    distributed = _dtensor_type()
    if distributed is None or not isinstance(gradient, distributed):
        return gradient
    with torch.no_grad():
        held: Any = gradient.to_local()
    # A DTensor that was just redistributed holds the promise of a tensor, with the tensor inside.
    return held.wait() if hasattr(held, "trigger_wait") else held  # type: ignore[no-any-return]


def is_distributed(parameter: Tensor) -> bool:
    """Say whether a tensor is a DTensor."""
    if type(parameter) in _PLAIN:
        return False
    distributed = _dtensor_type()
    return distributed is not None and isinstance(parameter, distributed)


def meshes(parameters: Iterable[Tensor]) -> tuple[DeviceMesh, ...]:
    """List the device meshes of the parameters that are DTensors.

    Parameters and not gradients: a rank that has no gradients in this iteration takes part in the collectives all the same,
    or the others would wait for it forever.

    Args:
        parameters: The parameters of an optimizer, plain ones among them or not, of any shape and dtype.

    Returns:
        The distinct meshes, in order of first appearance; that order is the same on all ranks if the optimizers are built
        alike. Empty where no parameter is a DTensor.

    Example:
        >>> import torch
        >>> from mezzo.torch.agreement import meshes
        >>> meshes(torch.nn.Linear(2, 2).parameters())
        ()
    """
    distributed = _dtensor_type()
    if distributed is None:
        return ()
    found: dict[DeviceMesh, None] = {}
    for parameter in parameters:
        if type(parameter) not in _PLAIN and isinstance(parameter, distributed):
            found[parameter.device_mesh] = None
    return tuple(found)


def has_partial(parameters: Iterable[Tensor]) -> bool:
    """Say whether a gradient is a DTensor whose ranks hold parts of a sum that has not been taken yet.

    Such is the gradient of a replicated weight that was used with sharded data. Each part may be finite where the sum of the
    scaled parts is not, in float16; so parts have to be divided before anybody, such as a fused optimizer, adds them up.

    Args:
        parameters: The parameters of an optimizer, with or without gradients.

    Returns:
        Whether there is one. No rank waits for another.

    Example:
        >>> import torch
        >>> from mezzo.torch.agreement import has_partial
        >>> has_partial(torch.nn.Linear(2, 2).parameters())
        False
    """
    distributed = _dtensor_type()
    if distributed is None:
        return False
    for parameter in parameters:
        # Gradients of plain parameters are plain, and looking at them costs more than looking at the parameter's class.
        if type(parameter) in _PLAIN:
            continue
        gradient = parameter.grad
        if isinstance(gradient, distributed) and any(placement.is_partial() for placement in gradient.placements):
            return True
    return False


def agree_(found: Tensor, meshes: Iterable[DeviceMesh], process_group: ProcessGroup | None) -> None:
    """Bring flags to their maximum over all ranks that share a model, in place.

    Every rank of the meshes and of the group has to call this, equally often and with as many flags. Ranks reduce over one
    group after the other, each distinct group once. All then have the same flags if the groups are the rows and columns of
    one grid of ranks, as those of a mesh are, or if one of them has all ranks.

    Nothing is read by the host. Only flags on a device that the group cannot reduce on, say on the CPU in a group of NCCL's,
    travel to one that it can and back; one of the two is then a CPU, which waits.

    Args:
        found: Flags as float32, none of them NaN, of any shape: 0 for no, more for yes.
        meshes: The device meshes of the parameters, as `meshes` gives them. A mesh that this rank is not in is passed over.
        process_group: One more group to agree in, or None.

    Raises:
        RuntimeError: From the backend, if another rank is gone or does not come within the group's timeout.

    Example:
        >>> import torch
        >>> from mezzo.torch.agreement import agree_
        >>> found = torch.tensor([0.0, 1.0])
        >>> agree_(found, (), None)
        >>> found
        tensor([0., 1.])
    """
    done: list[ProcessGroup] = []
    for group in _groups(meshes, process_group):
        # Sub-meshes share groups with the mesh that they are cut from.
        if not any(group is other for other in done):
            done.append(group)
            _maximum_(found, group)


def check_process_group(group: object) -> ProcessGroup | None:
    """Check what was given as ``process_group=``.

    Args:
        group: What came.

    Returns:
        It, if it is a process group that this rank is in, or None.

    Raises:
        ScalingError: If it is anything else.

    Example:
        >>> from mezzo.torch.agreement import check_process_group
        >>> check_process_group("world")
        Traceback (most recent call last):
        ...
        mezzo.errors.ScalingError: process_group has to be a torch.distributed.ProcessGroup or None; got 'world' of type \
str. Pass torch.distributed.group.WORLD, or what torch.distributed.new_group returned, after init_process_group.
    """
    if group is None:
        return None
    distributed: Any = torch.distributed
    if distributed.is_available() and isinstance(group, distributed.ProcessGroup):
        return cast("ProcessGroup", group)
    msg = (
        "process_group has to be a torch.distributed.ProcessGroup or None; "
        f"got {group!r} of type {type(group).__name__}. {_advice(group)}"
    )
    raise ScalingError(msg)


def _advice(group: object) -> str:
    distributed: Any = torch.distributed
    if not distributed.is_available():
        return "This build of PyTorch has no torch.distributed: leave process_group out."
    if isinstance(group, int) and group == distributed.GroupMember.NON_GROUP_MEMBER:
        return "That is what new_group returns on a rank outside the group: pass None there."
    if hasattr(group, "get_group") and hasattr(group, "mesh_dim_names"):
        return "Of a DeviceMesh pass one group: mesh.get_group('name of the dimension')."
    return "Pass torch.distributed.group.WORLD, or what torch.distributed.new_group returned, after init_process_group."


def _dtensor_type() -> Any:
    """The class DTensor, or None as long as nobody has imported it: then there is none of its instances either."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def _groups(meshes: Iterable[DeviceMesh], process_group: ProcessGroup | None) -> Iterator[ProcessGroup]:
    for mesh in meshes:
        if mesh.get_coordinate() is not None:
            yield from mesh.get_all_groups()
    if process_group is not None:
        yield process_group


def _maximum_(found: Tensor, group: ProcessGroup) -> None:
    if group.size() == 1:
        return
    where = _place_to_reduce(found.device, group)
    flags = found if where is None else found.to(where)
    # Not asynchronous: a flag that is copied before the collective is through is a rank of another opinion.
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, group=group)
    if where is not None:
        found.copy_(flags)


def _place_to_reduce(device: torch.device, group: ProcessGroup) -> str | None:
    """The device type that flags have to move to, or None if the group reduces on the one where they are.

    Gloo names "cuda" in builds without CUDA too, so the CPU is taken where there is a choice. A group that names no device
    makes up its mind at the first collective.
    """
    known = [able.type for able in group._device_types]
    if not known or device.type in known:
        return None
    return "cpu" if "cpu" in known else known[0]
