"""Where in the program an op was called: the user's line, and what of PyTorch's and mezzo's lies between.

The stack is walked at every op that is watched, so what a piece of code is gets looked up once for each and is kept.
"""

from __future__ import annotations

import sys
import sysconfig
import weakref
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

import mezzo
from mezzo.report import SourceLine

__all__ = ["CallSite", "call_site", "in_compiled_function", "is_users"]


class _Kind(Enum):
    """What a piece of code is."""

    USER = "user"
    INSIDE = "inside"  # PyTorch's, mezzo's or Python's own
    ENGINE = "engine"  # calls the backward pass
    RECOMPUTES = "recomputes"  # activation checkpointing
    STEPS = "steps"  # an optimizer or a scaler
    WATCHES = "watches"  # what looks on


class CallSite(NamedTuple):
    """Where an op was called.

    Attributes:
        code: The user's function; None if there is none.
        line: The line in it.
        callers: Functions between that and the op.
        starts_backward: Whether a backward pass is about to begin.
        recomputed: Whether activation checkpointing runs the op again in the backward pass.
        stepping: Whether an optimizer or a scaler called it.
    """

    code: CodeType | None
    line: int
    callers: tuple[str, ...]
    starts_backward: bool
    recomputed: bool
    stepping: bool

    @property
    def source(self) -> SourceLine | None:
        """The user's line."""
        if self.code is None:
            return None
        return SourceLine(self.code.co_filename, self.line, self.code.co_name)


_TORCH = f"{Path(torch.__file__).parent}/"
_MEZZO = f"{Path(mezzo.__file__).parent}/"
_PYTHON = f"{sysconfig.get_paths()['stdlib']}/"
_RUNNERS = tuple(
    f"{Path(spec.origin).parent}/" for name in ("_pytest", "pluggy") if (spec := find_spec(name)) and spec.origin
)
"""What runs a user's function and is not called by it."""

_STEPS = (
    f"{_TORCH}optim/",
    f"{_TORCH}amp/grad_scaler.py",
    f"{_TORCH}nn/utils/clip_grad.py",
    *(f"{_MEZZO}torch/{name}" for name in ("scaler.py", "scaling/", "scaling_kernels.py", "masters/", "agreement.py")),
)

_WATCHES = tuple(
    f"{_MEZZO}torch/{name}.py"
    for name in (
        "recording/recorder",
        "recording/listed_ops",
        "recording/op_places",
        "recording/call_sites",
        "searching/search",
        "watching",
        "kernels",
        "eager",
    )
)
_EVAL_FRAME = f"{_TORCH}_dynamo/eval_frame.py"


def in_compiled_function() -> bool:
    """Say whether a function that `torch.compile` has made is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _EVAL_FRAME and frame.f_code.co_name == "compile_wrapper":
            return True
        frame = frame.f_back
    return False


def _kind(code: CodeType) -> _Kind:
    file, name = code.co_filename, code.co_name
    if file == f"{_TORCH}utils/checkpoint.py":
        return _Kind.RECOMPUTES
    if file in (f"{_TORCH}autograd/graph.py", f"{_TORCH}autograd/__init__.py"):
        return _Kind.ENGINE
    # Their wrappers of `step` are in every call of one, also of a user's own optimizer.
    if file.startswith(_STEPS) and name not in ("scale", "_scale_tensor", "apply_scale", "scale_nested"):
        return _Kind.STEPS
    if file.startswith(_WATCHES):
        return _Kind.WATCHES
    return _Kind.INSIDE if not is_users(file) else _Kind.USER


@cache
def is_users(file: str) -> bool:
    """Say whether a file is neither PyTorch's nor mezzo's nor Python's own, nor generated."""
    if file.startswith((_TORCH, _MEZZO, *_RUNNERS, "<frozen ")):
        return False
    return not file.startswith(_PYTHON) or "-packages" in file


_by_id: dict[int, tuple[weakref.ref[CodeType], _Kind]] = {}


def _kind_of(code: CodeType) -> _Kind:
    known = _by_id.get(id(code))
    if known is not None and known[0]() is code:
        return known[1]
    kind = _kind(code)
    _by_id[id(code)] = weakref.ref(code), kind
    return kind


def call_site(*, in_backward: bool, depth: int = 1) -> CallSite:
    """Find where the op that a mode has just been given was called.

    Args:
        in_backward: Whether autograd runs a backward node. What called the backward pass is not where the op is from then.
        depth: How many frames above this function's caller belong to the mode.

    Returns:
        The site.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    user: FrameType | None = None
    callers: list[str] = []
    starts = recomputed = stepping = False
    while frame is not None:
        kind = _kind_of(frame.f_code)
        if kind is _Kind.USER:
            user = user or frame
            if not in_backward:
                break
        elif in_backward and kind is _Kind.ENGINE:
            break
        elif kind is _Kind.RECOMPUTES and in_backward:
            recomputed = True
            break
        elif kind is _Kind.ENGINE:
            starts = True
        elif user is None:
            if kind is not _Kind.WATCHES:
                callers.append(frame.f_code.co_name)
            stepping = stepping or kind is _Kind.STEPS
        frame = frame.f_back
    if user is None:
        return CallSite(None, 0, tuple(callers), starts, recomputed, stepping)
    return CallSite(user.f_code, user.f_lineno, tuple(callers), starts, recomputed, stepping)
