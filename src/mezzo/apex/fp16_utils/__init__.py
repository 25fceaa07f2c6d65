"""In the place of `apex.fp16_utils`: the conversions by hand that came before `amp`.

They are float16, as in Apex. For new code there is `mezzo.torch.prepare`, which does all of it and keeps masters up to date.
"""

from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from mezzo.apex.fp16_utils.conversion import (
    BN_convert_float,
    FP16Model,
    convert_module,
    convert_network,
    network_to_half,
    to_python_float,
    tofp16,
)
from mezzo.apex.fp16_utils.gone import DynamicLossScaler, FP16_Optimizer, LossScaler
from mezzo.apex.fp16_utils.masters import (
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
)

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]
