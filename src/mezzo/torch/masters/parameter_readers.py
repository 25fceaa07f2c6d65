"""Which op of PyTorch reads a parameter, by the type of the module that owns it.

The table holds for the modules of `torch.nn` as their own ``forward`` is written. A subclass that brings its own, a
parametrization, or a module that is not in the table may read a parameter in any op; then there is no answer, but a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import ParametrizationList

__all__ = ["Reader", "reader_of"]


@dataclass(frozen=True, slots=True)
class Reader:
    """The op that reads a parameter.

    Attributes:
        op: Canonical name.
        inside: The op inside it that reads the parameter where ``op`` has no rule of its own; empty if there is not one.
        inside_on: The only device type on which it is that one; empty for all of them.
        refusal: What to say if the op has no rule for the lower precision; empty for the plain fact.
    """

    op: str
    inside: str = ""
    inside_on: str = ""
    refusal: str = ""


_WEIGHT_AND_BIAS: Final = ("weight", "bias")
_OPS: Final[dict[type[nn.Module], dict[str, str]]] = {
    nn.Linear: dict.fromkeys(_WEIGHT_AND_BIAS, "linear"),
    nn.Bilinear: dict.fromkeys(_WEIGHT_AND_BIAS, "bilinear"),
    nn.Conv1d: dict.fromkeys(_WEIGHT_AND_BIAS, "conv1d"),
    nn.Conv2d: dict.fromkeys(_WEIGHT_AND_BIAS, "conv2d"),
    nn.Conv3d: dict.fromkeys(_WEIGHT_AND_BIAS, "conv3d"),
    nn.ConvTranspose1d: dict.fromkeys(_WEIGHT_AND_BIAS, "conv_transpose1d"),
    nn.ConvTranspose2d: dict.fromkeys(_WEIGHT_AND_BIAS, "conv_transpose2d.input"),
    nn.ConvTranspose3d: dict.fromkeys(_WEIGHT_AND_BIAS, "conv_transpose3d.input"),
    nn.MultiheadAttention: {
        **dict.fromkeys(
            ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"), "linear"
        ),
        **dict.fromkeys(("bias_k", "bias_v"), "cat"),
    },
    nn.PReLU: {"weight": "prelu"},
    nn.Embedding: {"weight": "embedding"},
    nn.EmbeddingBag: {"weight": "embedding_bag.padding_idx"},
    nn.LayerNorm: dict.fromkeys(_WEIGHT_AND_BIAS, "layer_norm"),
    nn.RMSNorm: {"weight": "rms_norm"},
    nn.GroupNorm: dict.fromkeys(_WEIGHT_AND_BIAS, "group_norm"),
    _BatchNorm: dict.fromkeys(_WEIGHT_AND_BIAS, "batch_norm"),
    _InstanceNorm: dict.fromkeys(_WEIGHT_AND_BIAS, "instance_norm"),
    nn.LSTM: {},  # these name their parameters by layer and direction
    nn.GRU: {},
    nn.RNN: {},
    nn.LSTMCell: dict.fromkeys(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), "lstm_cell"),
    nn.GRUCell: dict.fromkeys(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), "gru_cell"),
    nn.RNNCell: dict.fromkeys(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), "rnn_{}_cell"),
}

_READING: Final = ("forward", "_conv_forward", "__call__")
"""The methods in which these modules read their parameters."""


def reader_of(module: nn.Module, attribute: str, parent: nn.Module | None = None) -> Reader | str:
    """Say which op reads a parameter when the module that owns it is called.

    Args:
        module: The owner.
        attribute: The parameter's name there.
        parent: The module that holds the owner, if any: two of PyTorch's read the parameters of a module inside.

    Returns:
        The op, or a short sentence that says why it is not known. Reads the module only, so it is safe in any thread.

    Example:
        >>> reader_of(nn.Linear(2, 2), "weight").op
        'aten::linear'
        >>> reader_of(nn.ModuleList(), "scale")
        'what reads the parameters of ModuleList is not known'
    """
    if isinstance(module, ParametrizationList):
        return "it is parametrized, so other ops read it"
    known = next((cls for cls in type(module).__mro__ if cls in _OPS), None)
    if known is None:
        return f"what reads the parameters of {type(module).__name__} is not known"
    if _is_overridden(module, known):
        return "forward is overridden"
    if isinstance(module, nn.RNNBase):
        return _layer_of_cells(module, attribute)
    op = _OPS[known].get(attribute)
    if op is None:
        return f"what reads {attribute!r} is not known"
    if attribute == "weight" and getattr(module, "max_norm", None) is not None:
        return "max_norm writes to it in each forward"
    # This module is new in PyTorch 2.13. It never calls the layer inside, and may multiply by its weight in chunks.
    if attribute in _WEIGHT_AND_BIAS and type(parent).__name__ == "LinearCrossEntropyLoss":
        return "LinearCrossEntropyLoss reads it in ops of its own"
    return _reader(module, op)


def _is_overridden(module: nn.Module, known: type[nn.Module]) -> bool:
    """Say whether a module reads its parameters in code that is not that of the class in the table."""
    return any(
        name in vars(module) or getattr(type(module), name, None) is not getattr(known, name, None) for name in _READING
    )


def _layer_of_cells(module: nn.RNNBase, attribute: str) -> Reader | str:
    if attribute not in module._flat_weights_names:
        return f"what reads {attribute!r} is not known"
    # On CUDA these kernels want their weights in one block of memory, and cast them to float16 in a bfloat16 region too. On
    # the CPU the gradient of a projection (proj_size) would be summed in the lower precision.
    op = module.mode.lower()
    return Reader(f"aten::{op}.input", refusal=f"{op} leaves its weights to kernels that differ by device")


def _reader(module: nn.Module, op: str) -> Reader:
    if op.startswith("conv"):
        # Without a rule, both kinds of convolution come down to this one.
        is_named = isinstance(getattr(module, "padding", None), str) and getattr(module, "padding_mode", "") == "zeros"
        return Reader(f"aten::{op}.padding" if is_named else f"aten::{op}", "aten::convolution")
    if op.endswith("_cell"):
        # A GPU has fused kernels for the second half of a cell, which read the biases. The CPU has not.
        return Reader(f"aten::{op.format(getattr(module, 'nonlinearity', ''))}", "aten::linear", "cpu")
    return Reader(f"aten::{op}")
