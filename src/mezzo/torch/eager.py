"""Keeping `torch.compile` out of code that changes PyTorch's state.

Where Dynamo cannot trace a function, it runs it and tries again on the functions that it calls. mezzo's own must not be
compiled then: a compiled ``__enter__`` would set the state of autocast and have it put back at the end of its own graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["not_compiled_alone", "pause_compiling", "resume_compiling", "runs_eagerly", "runs_itself_eagerly"]

F = TypeVar("F", bound=Callable[..., Any])


def runs_eagerly(function: F) -> F:
    """Have Dynamo leave a function, and what it calls, as they are; a decorator that costs nothing at a call.

    Args:
        function: A Python function.

    Returns:
        The same function.
    """
    # Dynamo's own decorator does this too, and imports all of Dynamo.
    return _not_traced(not_compiled_alone(function))


def runs_itself_eagerly(function: F) -> F:
    """Have Dynamo leave a function as it is, but not what it calls: an optimizer's step under a scaler is compiled.

    Args:
        function: A Python function. Those of mezzo's that it calls are to be marked too.

    Returns:
        The same function.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, skip)
    return _not_traced(function)


def _not_traced(function: F) -> F:
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    reason = (
        "mezzo changes PyTorch's state here, or decides on the host. Of gradient scaling, scale() is traced; for a whole "
        "step in one graph use unscale_gradients, select_finite and next_scale"
    )
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return function


def not_compiled_alone(function: F) -> F:
    """Have Dynamo trace a function where it is called by code that is traced, and leave it as it is elsewhere.

    Args:
        function: A Python function.

    Returns:
        The same function.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, skip)
    return function


@runs_itself_eagerly
def pause_compiling() -> Any:
    """Have Dynamo leave alone what the thread runs from here on, up to `resume_compiling`.

    For hooks whose caller goes on with code that is not to be compiled: Dynamo would compile what comes after a function
    that it leaves alone. If that ends in an exception, the end of the compiled function resumes.

    Returns:
        What `resume_compiling` takes; None if nothing is being compiled.
    """
    if torch._C._dynamo.eval_frame.get_eval_frame_callback() is None:
        return None
    return torch._C._dynamo.eval_frame.set_eval_frame(None)


@runs_itself_eagerly
def resume_compiling(paused: Any) -> None:
    """Have Dynamo go on; does nothing with None."""
    if paused is not None:
        torch._C._dynamo.eval_frame.set_eval_frame(paused)
