"""The package `apex` of ``python -m mezzo.apex``: the installed Apex, if there is one, and what it lacks from mezzo."""

import sys as _sys
from importlib import import_module as _import_module


def _start() -> None:
    installed = _import_module("mezzo.apex.installed")
    stand_in = _import_module("mezzo.apex.stand_in")
    module, spec = _sys.modules[__name__], installed.find()
    stand_in.install()
    if spec is not None:
        installed.run_in_place(module, spec)
    if spec is None or not installed.has(spec, "amp"):
        _give_parts_as_attributes(stand_in.PARTS)


def _give_parts_as_attributes(parts: object) -> None:
    """After ``import apex`` the parts are there, as in Apex, but loaded only when they are asked for."""
    theirs = globals().get("__getattr__")

    def __getattr__(name: str) -> object:  # noqa: N807 - the protocol's name, for the module below
        if name in parts:  # type: ignore[operator]
            return _import_module(f"{__name__}.{name}")
        if theirs is not None:
            return theirs(name)
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)

    globals()["__getattr__"] = __getattr__


# Under its own name only: mezzo.apex.shim.apex, as which tools may import it, is nobody's Apex.
if __name__ == "apex":
    _start()
