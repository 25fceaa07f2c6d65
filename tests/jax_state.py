"""What a test with JAX could leave behind: its configuration, open scopes and traces, and who watches mezzo's rewrites."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["configuration", "left_behind", "put_back"]

OPTIONS = """
jax_allow_f16_reductions jax_check_tracer_leaks jax_debug_nans jax_default_matmul_precision jax_disable_jit
jax_enable_checks jax_enable_x64 jax_numpy_dtype_promotion jax_numpy_rank_promotion
""".split()
"""Those that change numbers or dtypes, or whether there is an error."""


def configuration() -> dict[str, Any]:
    """Give the options of JAX as they are in this thread; nothing if no test has imported JAX yet."""
    jax = sys.modules.get("jax")
    return {} if jax is None else {name: getattr(jax.config, name) for name in OPTIONS if hasattr(jax.config, name)}


def left_behind(before: dict[str, Any]) -> dict[str, object]:
    """Say what is not as it was, or as it has to be between tests."""
    if "jax" not in sys.modules:
        return {}
    from jax._src import core, source_info_util

    found: dict[str, object] = {
        name: value for name, value in configuration().items() if value != before.get(name, value)
    }
    if not core.trace_state_clean():
        found["trace"] = "still open"
    if scopes := str(source_info_util.current_name_stack()):
        found["named scopes"] = scopes
    if "mezzo.jax" in sys.modules:
        from mezzo.jax.observing import current_observer

        if observer := current_observer():
            found["observer"] = observer
    return found


def put_back(before: dict[str, Any]) -> None:
    """Set the options that are not as they were."""
    for name, value in configuration().items():
        if value != before.get(name, value):
            sys.modules["jax"].config.update(name, before[name])
