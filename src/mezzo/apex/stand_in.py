"""A stand-in for the package `apex`: which of its modules mezzo has, and how they are found.

The folder `FOLDER` has a package `apex` on disk, for ``sys.path``. What is in it, and what an installed Apex lacks, comes
from the finder here: a module of Apex's name is the one of mezzo, the same object, not a copy. It is asked after all other
finders, so modules of an installed Apex win.
"""

from __future__ import annotations

import importlib
import importlib.abc
import pkgutil
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from mezzo.apex import installed

__all__ = ["FOLDER", "PARTS", "install"]

FOLDER = str(Path(__file__).parent / "shim")
"""The folder that goes into ``sys.path``."""

PARTS: dict[str, dict[str, str]] = {
    "amp": {"scaler": "loss_scaler"},
    "parallel": {"LARC": "larc", "optimized_sync_batchnorm": "sync_batchnorm"},
    "fp16_utils": {"fp16util": "", "fp16_optimizer": "gone", "loss_scaler": "gone"},
    "optimizers": {"fused_lamb": "missing", "fused_novograd": "missing"},
    "multi_tensor_apply": {"multi_tensor_apply": ""},
    "normalization": {"fused_layer_norm": ""},
}
"""The modules of Apex that mezzo has, each with Apex's submodules and where in ours their names are ("": in itself)."""

_ADVICE = {
    "RNN": "torch.nn.RNN, LSTM and GRU serve in its place.",
    "contrib": "Parts of it need CUDA extensions, which NVIDIA's Apex has to be built with.",
    "transformer": "It moved to Megatron-LM.",
}


class _Loader(importlib.abc.Loader):
    """Puts a module of mezzo's in the place of the one that is imported."""

    def exec_module(self, module: types.ModuleType) -> None:
        _stand_in(module.__name__.removeprefix("apex."))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules of Apex that nobody else has found."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,  # noqa: ARG002 - the protocol's
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "apex" or not name or _has_amp_itself():
            return None
        if name in PARTS:
            return ModuleSpec(fullname, _Loader(), origin=f"mezzo.{fullname}")
        # Whether there is a module may be asked, and is then no error.
        if sys._getframe(2).f_globals.get("__name__") == "importlib.util":
            return None
        raise ModuleNotFoundError(_explanation(name, path), name="apex")


def _has_amp_itself() -> bool:
    """Whether the `apex` in use is one from before the removal, which is left as it is."""
    spec = getattr(sys.modules.get("apex"), "__spec__", None)
    return spec is not None and installed.has(spec, "amp")


def _stand_in(part: str) -> None:
    """Have the names of a part of Apex, and of its submodules, stand for mezzo's modules."""
    ours = importlib.import_module(f"mezzo.apex.{part}")
    sys.modules[f"apex.{part}"] = ours
    # All of them now: imported later, a submodule would be run a second time, and put itself into ours as an attribute, in
    # the place of the object of the same name (amp._amp_state, parallel.LARC).
    for info in pkgutil.iter_modules(getattr(ours, "__path__", ())):
        sys.modules[f"apex.{part}.{info.name}"] = importlib.import_module(f"{ours.__name__}.{info.name}")
    for theirs, where in PARTS[part].items():
        name = f"{ours.__name__}.{where}" if where else ours.__name__
        sys.modules[f"apex.{part}.{theirs}"] = importlib.import_module(name)


def _explanation(name: str, path: Sequence[str] | None) -> str:
    part, _, rest = name.partition(".")
    theirs = [one for one in path or () if not one.startswith(FOLDER)]
    if part in PARTS:
        names = getattr(sys.modules.get(f"apex.{part}"), "__all__", ())
        return (
            f"apex.{part} is mezzo's here, and has no module {rest!r}. Import what is public from apex.{part} "
            f"itself: {', '.join(names)}."
        )
    also = (
        f"the Apex installed in {theirs[0]} has none, nor has mezzo, which" if theirs else "apex is mezzo's here, which"
    )
    return (
        f"There is no module 'apex.{name}': {also} stands in for {', '.join(f'apex.{one}' for one in PARTS)}. "
        f"{_ADVICE.get(part, 'If the script needs it, it needs an Apex that has it.')}"
    )


def install() -> None:
    """Add the finder, once. Modules of `apex` that are found elsewhere stay what they are.

    Example:
        >>> import sys
        >>> from mezzo.apex import stand_in
        >>> stand_in.install()
        >>> stand_in.install()
        >>> sum(type(one).__module__ == "mezzo.apex.stand_in" for one in sys.meta_path)
        1
    """
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.append(_Finder())
