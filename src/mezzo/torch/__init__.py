"""mezzo for PyTorch: autocast with a policy one can read and change.

Example:
    >>> import torch, mezzo.torch
    >>> with mezzo.torch.autocast("cpu", dtype=torch.bfloat16):
    ...     print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    torch.bfloat16
"""

from mezzo.torch import cpu, cuda
from mezzo.torch.accelerators import accelerator_policy, register_accelerator, register_kernel
from mezzo.torch.autocast import autocast, is_autocast_available
from mezzo.torch.carrying import AutocastState, bind, capture
from mezzo.torch.foreign import Registration, register_function
from mezzo.torch.function_check import check_function
from mezzo.torch.functions import custom_bwd, custom_fwd
from mezzo.torch.keeping import keep_casts
from mezzo.torch.linting.lint import lint
from mezzo.torch.masters.float32_weights import float32_state_dict
from mezzo.torch.masters.lost_updates import LostUpdates, count_lost_updates
from mezzo.torch.masters.memory_report import MemoryReport, memory_report
from mezzo.torch.masters.params import master_params
from mezzo.torch.masters.prepare import prepare
from mezzo.torch.masters.steps import refresh_model
from mezzo.torch.masters.unprepare import unprepare
from mezzo.torch.observe import Observation, OpCall, observe
from mezzo.torch.policies import active_policy, get_default_policy, set_default_policy
from mezzo.torch.precision import Precision, clear_precision, set_precision
from mezzo.torch.recording.explain import explain
from mezzo.torch.scaler import GradScaler
from mezzo.torch.scaling.functional import next_scale, select_finite, unscale_gradients
from mezzo.torch.scaling.merging import step_merged
from mezzo.torch.scaling.nonfinite import NonFinite, Overflow
from mezzo.torch.scaling.scale_history import ScaleHistory
from mezzo.torch.scaling.scale_recording import ScaleRow
from mezzo.torch.scaling.schedules import SteppedScheduler
from mezzo.torch.searching.find_nonfinite import find_nonfinite

__all__ = [
    "autocast",
    "is_autocast_available",
    "custom_fwd",
    "custom_bwd",
    "GradScaler",
    "ScaleHistory",
    "ScaleRow",
    "SteppedScheduler",
    "step_merged",
    "unscale_gradients",
    "next_scale",
    "select_finite",
    "NonFinite",
    "Overflow",
    "prepare",
    "unprepare",
    "master_params",
    "refresh_model",
    "float32_state_dict",
    "memory_report",
    "MemoryReport",
    "count_lost_updates",
    "LostUpdates",
    "set_default_policy",
    "get_default_policy",
    "active_policy",
    "keep_casts",
    "explain",
    "find_nonfinite",
    "lint",
    "observe",
    "Observation",
    "OpCall",
    "bind",
    "capture",
    "AutocastState",
    "set_precision",
    "clear_precision",
    "Precision",
    "register_function",
    "Registration",
    "check_function",
    "register_accelerator",
    "register_kernel",
    "accelerator_policy",
    "cpu",
    "cuda",
]
