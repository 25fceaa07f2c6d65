"""Which frameworks the demo can train with here, and how to get the others."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, get_args

from mezzo.demo.results import Framework
from mezzo.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

Choice = Literal["torch", "jax", "tensorplay", "all"]

NEEDS: Mapping[Framework, tuple[str, ...]] = {
    "torch": ("torch",),
    "jax": ("jax", "flax", "optax"),
    "tensorplay": ("tensorplay",),
}
NAMES: Mapping[Framework, str] = {"torch": "PyTorch", "jax": "JAX", "tensorplay": "TensorPlay"}
COMMANDS: Mapping[Framework, str] = {
    "torch": "pip install 'mezzo[demo]'",
    "jax": "pip install 'mezzo[demo,jax]' flax optax",
    "tensorplay": "pip install 'mezzo[demo,tensorplay]'",
}


def missing(framework: Framework) -> str | None:
    """Name the first package that a framework's runs need and that is not installed; None if all are.

    Nothing is imported.
    """
    return next((package for package in NEEDS[framework] if not _is_installed(package)), None)


def choose(choice: str) -> tuple[Framework, ...]:
    """Decide which frameworks to train with.

    Args:
        choice: One of them, or "all" for those that are installed.

    Returns:
        At least one.

    Raises:
        OptionError: There is no such choice.
        ModuleNotFoundError: What was asked for is not installed; the message says how to get it.

    Example:
        >>> choose("warp")
        Traceback (most recent call last):
        mezzo.errors.OptionError: The demo got framework='warp'; expected 'torch', 'jax', 'tensorplay' or 'all'.
    """
    if choice not in get_args(Choice):
        message = f"The demo got framework={choice!r}; expected 'torch', 'jax', 'tensorplay' or 'all'."
        raise OptionError(message)
    wanted = [framework for framework in get_args(Framework) if choice in (framework, "all")]
    present = tuple(framework for framework in wanted if missing(framework) is None)
    if not present:
        package = missing(wanted[0])
        message = f"the demo needs {package}, which is not installed; run: {COMMANDS[wanted[0]]}"
        raise ModuleNotFoundError(message, name=package)
    return present


def advice(framework: Framework) -> str:
    """Say in one line that a framework's runs are left out, and what to install for them.

    Example:
        >>> advice("jax")[:27]
        'The JAX runs are left out: '
    """
    return (
        f"The {NAMES[framework]} runs are left out: {missing(framework)} is not installed. "
        f"To have them: {COMMANDS[framework]}"
    )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # what finders say who know that it is not there
        return False
