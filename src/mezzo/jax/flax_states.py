"""Checkpoints of Flax: its serialization knows only classes that were registered with it."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax

__all__ = ["register_with_flax"]

_registered: set[type] = set()


def register_with_flax(kind: type) -> None:
    """Let ``flax.serialization`` save and restore a frozen dataclass that is a pytree, if Flax has been imported.

    Saved are its arrays. What is static, such as the numbers of a rule, is that of the object that is restored into,
    as with Flax's own dataclasses. Any thread may call it, any number of times.

    Args:
        kind: The dataclass.
    """
    serialization = sys.modules.get("flax.serialization")
    if serialization is None or kind in _registered:
        return
    _registered.add(kind)
    serialization.register_serialization_state(kind, _saved, _restored, override=True)


def _saved(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _array_fields(value)}


def _restored(value: Any, state: dict[str, Any]) -> Any:
    names = _array_fields(value)
    missing = [name for name in names if name not in state]
    if missing:
        msg = f"the saved {type(value).__name__} has no {', '.join(missing)}; it was saved as something else."
        raise ValueError(msg)
    arrays = {name: jax.numpy.asarray(state[name], getattr(value, name).dtype) for name in names}
    return dataclasses.replace(value, **arrays)


def _array_fields(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value) if hasattr(getattr(value, field.name), "dtype")]
