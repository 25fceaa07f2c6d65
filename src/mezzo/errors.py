"""The errors mezzo raises.

Each is a `MezzoError` and also the built-in exception that fits, so both ``except MezzoError`` and the handlers that
code already has keep working. A message says what came, what is allowed, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "AmpError",
    "AmpOptionError",
    "AmpTypeError",
    "ArrayTypeError",
    "BannedOpError",
    "DeviceError",
    "DtypeError",
    "MezzoError",
    "MutationError",
    "NonFiniteNormError",
    "OptionError",
    "PolicyError",
    "PolicyFileError",
    "PreparationError",
    "RegionError",
    "RegistrationError",
    "ScalerProtocolError",
    "ScalingError",
    "SkippedStepsError",
    "UnknownOpError",
    "UnknownPolicyError",
    "UnsupportedVersionError",
]


class MezzoError(Exception):
    """Base of every error that mezzo raises on purpose."""


class PolicyError(MezzoError, ValueError):
    """A policy says something that cannot be done, or has a value of the wrong kind."""


class UnknownOpError(MezzoError, LookupError):
    """A policy names an op that the framework does not have."""


class UnknownPolicyError(MezzoError, LookupError):
    """A policy was asked for by a name that no built-in policy has."""


class PolicyFileError(MezzoError, ValueError):
    """A policy file is not valid TOML, or has a key or value that a policy does not know."""


class BannedOpError(MezzoError, RuntimeError):
    """An op was called that the active policy bans."""


class DeviceError(MezzoError, RuntimeError):
    """A device type was named that does not exist, or for which there is no autocast."""


class DtypeError(MezzoError, RuntimeError):
    """A dtype was asked for that the device cannot compute in."""


class RegistrationError(MezzoError, RuntimeError):
    """An accelerator cannot be given autocast: it lacks something, or has something of its own that would be overruled."""


class RegionError(MezzoError, RuntimeError):
    """An autocast region was left that had not been entered."""


class ScalingError(MezzoError, ValueError, AssertionError):
    """Gradient scaling was given a number that it cannot work with.

    It is an ``AssertionError`` too, because that is what PyTorch raises for the same numbers.
    """


class ScalerProtocolError(MezzoError, RuntimeError, AssertionError):
    """The methods of a gradient scaler were called in an order that has no meaning.

    It is an ``AssertionError`` too, because that is what PyTorch raises for some of these orders.
    """


class SkippedStepsError(MezzoError, RuntimeError):
    """As many optimizer steps in a row were skipped for non-finite gradients as the scaler was told to allow."""


class NonFiniteNormError(MezzoError, RuntimeError):
    """Gradients were to be clipped whose norm is not finite, and the caller had asked for an error."""


class NonFiniteError(MezzoError, FloatingPointError):
    """An op gave NaN or Inf though what went in was finite, and the user asked for that to be an error.

    Attributes:
        found: What is known of it, a `mezzo.report.nonfinite.NonFiniteOp`; None if the error was made without.
    """

    def __init__(self, message: str, found: object = None) -> None:
        super().__init__(message)
        self.found = found

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, object]]:
        return type(self), (str(self), self.found)


class PreparationError(MezzoError, RuntimeError, ValueError):
    """A model or optimizer cannot be prepared for low-precision parameters, or cannot be worked with once it is."""


class OptionError(MezzoError, ValueError):
    """An option has a value that is not allowed."""


class ArrayTypeError(MezzoError, TypeError):
    """A function was given, or returned, something that stands for numbers and is no array of its framework."""


class MutationError(MezzoError, RuntimeError):
    """A function that was to be traced changed state in place, which would have been lost."""


class UnsupportedVersionError(MezzoError, ImportError):
    """An adapter was imported with a release of its framework that it does not work with."""


class AmpError(MezzoError, RuntimeError):
    """`mezzo.apex.amp` was called in a way, or in an order, that it cannot work with."""


class AmpOptionError(AmpError, ValueError, AssertionError):
    """An option of ``amp.initialize`` has a value that is not allowed, or that does not go with the level.

    It is a ``ValueError`` and an ``AssertionError`` too, because Apex raised one or the other.
    """


class AmpTypeError(AmpError, TypeError):
    """``amp.initialize`` got something that is neither a model, an optimizer, nor a list of them."""


def near(name: str, known: Iterable[str], *, count: int = 3) -> str:
    """Say which known names resemble ``name``, as the end of a message.

    Args:
        name: What came.
        known: The names that are allowed.
        count: How many names to offer at most.

    Returns:
        ``" Did you mean 'a' or 'b'?"``, or an empty string if nothing is near.

    Example:
        >>> near("sofmax", ["softmax", "relu"])
        " Did you mean 'softmax'?"
    """
    found = difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)
    if not found:
        return ""
    quoted = [repr(item) for item in found]
    listed = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
    return f" Did you mean {listed}?"
