"""What a test with TensorPlay could leave behind: open regions, names that are still wrapped, native autocast state."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["left_behind", "put_back", "snapshot"]

NATIVE = {
    "cpu enabled": False,
    "cuda enabled": False,
    "cpu dtype": "tensorplay.bfloat16",
    "cuda dtype": "tensorplay.float16",
    "cache flag": True,
}
"""The state of the package's own autocast between tests."""

Snapshot = dict[str, dict[str, Any]]


def snapshot() -> Snapshot:
    """Give each name at the places where the adapter wraps some; nothing if no test has imported TensorPlay yet."""
    tensorplay = sys.modules.get("tensorplay")
    if tensorplay is None:
        return {}
    places = {
        "tensorplay": tensorplay,
        "tensorplay._C": tensorplay._C,
        "tensorplay.Tensor": tensorplay.Tensor,
        "tensorplay.functional": tensorplay.functional,
        "tensorplay.nn.functional": tensorplay.nn.functional,
        "tensorplay.linalg": tensorplay.linalg,
        "tensorplay.amp": tensorplay.amp,
        "tensorplay.amp.autocast_mode": tensorplay.amp.autocast_mode,
    }
    return {name: dict(vars(place)) for name, place in places.items()}


def left_behind(before: Snapshot) -> dict[str, object]:
    """Say what is not as it was, or as it has to be between tests."""
    if "tensorplay" not in sys.modules:
        return {}
    found: dict[str, object] = {}
    if names := changed(before, snapshot()):
        found["TensorPlay's names"] = names
    if _adapter_is_there():
        found |= _of_the_adapter()
    # Asked in the package itself: the names above may still be the adapter's.
    native = {name: value for name, value in _native_state().items() if value != NATIVE[name]}
    return found | {f"TensorPlay's {name}": value for name, value in native.items()}


def changed(before: Snapshot, after: Snapshot) -> list[str]:
    """Name what is no longer the same object; names that came since are imports of the package's own parts."""
    return [
        f"{place}.{name}"
        for place, names in before.items()
        for name, value in names.items()
        if after[place].get(name) is not value
    ]


def put_back() -> None:
    """Set the state of this thread to what it is between tests; the names that are wrapped are their owner's."""
    tensorplay = sys.modules.get("tensorplay")
    if tensorplay is None:
        return
    for device in ("cpu", "cuda"):
        tensorplay.set_autocast_enabled(device, False)
        tensorplay.set_autocast_dtype(device, getattr(tensorplay, NATIVE[f"{device} dtype"].rpartition(".")[2]))
    tensorplay.set_autocast_cache_enabled(True)
    tensorplay.clear_autocast_cache()
    if _adapter_is_there():
        sys.modules["mezzo.tensorplay"].set_default_policy(None)


def _adapter_is_there() -> bool:
    """Say whether the adapter has been imported to its end: a test may have seen it refuse to be."""
    return hasattr(sys.modules.get("mezzo.tensorplay"), "set_default_policy")


def _of_the_adapter() -> dict[str, object]:
    import mezzo.tensorplay
    from mezzo.tensorplay import choke_points

    found: dict[str, object] = {
        "open regions": choke_points.open_regions(),
        "wrapped names": choke_points.changed_names(),
        "default policy": mezzo.tensorplay.get_default_policy().name,
    }
    clean = {"open regions": 0, "wrapped names": [], "default policy": "default"}
    return {f"TensorPlay's {name}": value for name, value in found.items() if value != clean[name]}


def _native_state() -> dict[str, object]:
    import tensorplay

    return {
        "cpu enabled": tensorplay.is_autocast_enabled("cpu"),
        "cuda enabled": tensorplay.is_autocast_enabled("cuda"),
        "cpu dtype": str(tensorplay.get_autocast_dtype("cpu")),
        "cuda dtype": str(tensorplay.get_autocast_dtype("cuda")),
        "cache flag": tensorplay.is_autocast_cache_enabled(),
    }
