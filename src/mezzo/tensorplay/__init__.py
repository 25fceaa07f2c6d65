"""mezzo for TensorPlay: the documented autocast, on the real package, without its faults.

Example:
    >>> import tensorplay, mezzo.tensorplay
    >>> with mezzo.tensorplay.autocast("cpu", dtype=tensorplay.bfloat16):
    ...     print((tensorplay.ones(2, 2) @ tensorplay.ones(2, 2)).dtype)
    tensorplay.bfloat16
"""

from mezzo.tensorplay import contract
from mezzo.tensorplay.ops import named_ops

contract.check_version()
contract.check_names(named_ops())

from mezzo.tensorplay import cpu, cuda  # noqa: E402 - these need the names that were just checked
from mezzo.tensorplay.autocast import autocast, autocast_decorator, is_autocast_available  # noqa: E402
from mezzo.tensorplay.carrying import AutocastState, bind, capture, watch_checkpoints  # noqa: E402
from mezzo.tensorplay.casting import watch_explicit_casts  # noqa: E402
from mezzo.tensorplay.functions import custom_bwd, custom_fwd  # noqa: E402
from mezzo.tensorplay.policies import active_policy, get_default_policy, set_default_policy  # noqa: E402
from mezzo.tensorplay.queries import get_autocast_dtype, is_autocast_enabled, watch_queries  # noqa: E402
from mezzo.tensorplay.recurrent import watch_recurrent_layers  # noqa: E402
from mezzo.tensorplay.scaler import GradScaler  # noqa: E402
from mezzo.tensorplay.scaling.reports import NonFinite  # noqa: E402
from mezzo.tensorplay.weight_casts import watch_memory  # noqa: E402

watch_queries()
watch_checkpoints()
watch_memory()
watch_explicit_casts()
watch_recurrent_layers()

__all__ = [
    "autocast",
    "autocast_decorator",
    "is_autocast_available",
    "custom_fwd",
    "custom_bwd",
    "GradScaler",
    "NonFinite",
    "set_default_policy",
    "get_default_policy",
    "active_policy",
    "bind",
    "capture",
    "AutocastState",
    "is_autocast_enabled",
    "get_autocast_dtype",
    "cpu",
    "cuda",
]
