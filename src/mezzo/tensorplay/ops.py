"""TensorPlay's op names, and where its tables come from.

An op's name is that of its function in ``tensorplay._C``, without overloads, which a choke point cannot tell apart. The
tables are data: ``tables/tensorplay/cpu.csv`` and ``cuda.csv`` hold what the package itself casts on a device, read off the
kernels that it reveals (``tensorplay._C._dispatch_has_kernel_for_dispatch_key``) and measured; tests compare them.
"""

from __future__ import annotations

from functools import cache

from mezzo import tables

__all__ = ["FRAMEWORK", "named_ops"]

FRAMEWORK = "tensorplay"
"""The name under which the core keeps the tables."""


@cache
def named_ops() -> frozenset[str]:
    """Name the ops that a table has a rule or a repair for: what has to be there for mezzo to work.

    Returns:
        Canonical op names.

    Example:
        >>> "mm" in named_ops()
        True
    """
    listed = {op for device in tables.devices(FRAMEWORK) for op in tables.device_table(device, FRAMEWORK)}
    return frozenset(listed | tables.repairs(FRAMEWORK))
