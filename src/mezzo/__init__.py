"""mezzo: automatic mixed precision with one policy model for PyTorch, JAX and TensorPlay.

This is the neutral core. Importing it imports no framework; ``import mezzo.torch`` is the PyTorch adapter.

Example:
    >>> import mezzo
    >>> careful = mezzo.builtin_policy("unified").override({"softmax": "fp32"}, name="careful")
    >>> str(careful.rule("softmax"))
    'fp32'
"""

from importlib.metadata import version as _version

from mezzo.builtin import builtin_names, builtin_policy
from mezzo.decision import CastPolicy, input_dtypes
from mezzo.errors import (
    ArrayTypeError,
    BannedOpError,
    DeviceError,
    DtypeError,
    MezzoError,
    MutationError,
    NonFiniteNormError,
    OptionError,
    PolicyError,
    PolicyFileError,
    RegionError,
    RegistrationError,
    ScalerProtocolError,
    ScalingError,
    SkippedStepsError,
    UnknownOpError,
    UnknownPolicyError,
)
from mezzo.explanation import Explanation, OpExplanation
from mezzo.policy import Policy
from mezzo.rules import ByDtype
from mezzo.scaling import LossScaling, ScaleState, Verdict

__version__ = _version("mezzo")

__all__ = [
    "CastPolicy",
    "Policy",
    "ByDtype",
    "builtin_policy",
    "builtin_names",
    "input_dtypes",
    "Explanation",
    "OpExplanation",
    "LossScaling",
    "ScaleState",
    "Verdict",
    "MezzoError",
    "ArrayTypeError",
    "BannedOpError",
    "DeviceError",
    "DtypeError",
    "MutationError",
    "NonFiniteNormError",
    "OptionError",
    "PolicyError",
    "PolicyFileError",
    "RegionError",
    "RegistrationError",
    "ScalerProtocolError",
    "ScalingError",
    "SkippedStepsError",
    "UnknownOpError",
    "UnknownPolicyError",
    "__version__",
]
