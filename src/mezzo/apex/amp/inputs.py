"""The casts of what goes into a model and comes out of it, at the levels that cast the model (O0, O2, O3).

They are forward hooks that know a dtype and nothing of the module, so copies, pickles and replicas of a model have them
too, and work with their own weights. Compiled code that calls the model has the casts in its graph; `torch.compile(model)`
runs hooks outside of it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from mezzo.errors import AmpError
from mezzo.torch.eager import not_compiled_alone

__all__ = ["CastInputs", "CastOutputs", "cast_floats", "put_casts"]

_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_LEFT_ALONE = (
    *(bool, int, float, complex, str, bytes, type, nn.Module),
    *(torch.UntypedStorage, torch.TypedStorage),  # their `to` moves between devices
)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Give a value with its floating-point tensors in another dtype. Nothing is moved between devices.

    Args:
        value: A tensor, or anything around tensors. An object that has a method ``to`` is replaced by what ``to(dtype)``
            gives: so may a class of batches say how it is cast, be it a container or not. Lists, tuples (named ones too),
            sets, deques and mappings keep their type, and what is registered with ``torch.utils._pytree`` is entered.
            float64, float32, float16 and bfloat16 are cast. Integers, truth values, complex numbers, strings, NumPy
            arrays, modules, generators, the keys of mappings and what else there is are left alone.
        dtype: The dtype.

    Returns:
        The value; the same object if there was nothing to cast.

    Raises:
        AmpError: A method ``to`` returned None.

    Example:
        >>> batch = {"image": torch.ones(1), "label": torch.ones(1, dtype=torch.int64)}
        >>> {name: each.dtype for name, each in cast_floats(batch, torch.float16).items()}
        {'image': torch.float16, 'label': torch.int64}
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in _FLOATS else value
    if value is None or isinstance(value, _LEFT_ALONE):
        return value
    if isinstance(value, PackedSequence):
        # Its own `to` would make floats of the numbers of words.
        return value.to(dtype) if value.data.dtype in _FLOATS else value
    if callable(getattr(value, "to", None)):
        return _cast_itself(value, dtype)
    if isinstance(value, Mapping):
        return _cast_mapping(value, dtype)
    if isinstance(value, list | tuple | set | frozenset | deque):
        return _cast_items(value, dtype)
    if type(value) in pytree.SUPPORTED_NODES:
        return _cast_node(value, dtype)
    return value


def _cast_itself(value: Any, dtype: torch.dtype) -> Any:
    found = value.to(dtype)
    if found is None:
        name = type(value).__name__
        msg = (
            f"{name}.to({dtype}) returned None. amp casts what has a method `to` by calling it with the dtype, and goes on "
            f"with what it returns: have {name}.to return the object that is cast."
        )
        raise AmpError(msg)
    return found


def _cast_mapping(value: Any, dtype: torch.dtype) -> Any:
    old = dict(value.items())
    new = {key: cast_floats(each, dtype) for key, each in old.items()}
    changed = {key: each for key, each in new.items() if each is not old[key]}
    if not changed:
        return value
    # A copy of another class may share what it holds with the user's own.
    has_copies = isinstance(value, dict) or hasattr(type(value), "__copy__")
    if type(value) is dict or not (isinstance(value, MutableMapping) and has_copies):
        return new
    made = copy.copy(value)
    for key, each in changed.items():
        made[key] = each
    return made


def _cast_items(value: Any, dtype: torch.dtype) -> Any:
    old = list(value)
    new = [cast_floats(each, dtype) for each in old]
    if all(one is other for one, other in zip(new, old, strict=True)):
        return value
    if type(value) is list:
        return new
    if type(value) is tuple:
        return tuple(new)
    if hasattr(value, "_make"):
        return value._make(new)  # of a named tuple
    if isinstance(value, deque):
        return deque(new, value.maxlen)
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = new
        return made
    return type(value)(new)


def _cast_node(value: Any, dtype: torch.dtype) -> Any:
    children, context = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
    new = [cast_floats(each, dtype) for each in children]
    if all(one is other for one, other in zip(new, children, strict=True)):
        return value
    return pytree.SUPPORTED_NODES[type(value)].unflatten_fn(new, context)


@dataclass(frozen=True)
class CastInputs:
    """A forward pre-hook that casts a module's arguments, positional and by keyword.

    Attributes:
        dtype: To which.

    Example:
        >>> module = nn.Linear(2, 2).bfloat16()
        >>> handle = module.register_forward_pre_hook(CastInputs(torch.bfloat16), with_kwargs=True)
        >>> module(torch.ones(1, 2)).dtype
        torch.bfloat16
    """

    dtype: torch.dtype

    @not_compiled_alone
    def __call__(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Give the arguments to call the module's forward with."""
        return (
            tuple([cast_floats(each, self.dtype) for each in args]),
            {name: cast_floats(each, self.dtype) for name, each in kwargs.items()},
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _out_of_file, (type(self), self.dtype, RemovableHandle.next_id)


@dataclass(frozen=True)
class CastOutputs:
    """A forward hook that casts what a module returns.

    Attributes:
        dtype: To which.

    Example:
        >>> module = nn.Linear(2, 2).bfloat16()
        >>> handle = module.register_forward_hook(CastOutputs(torch.float32), prepend=True)
        >>> module(torch.ones(1, 2, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    dtype: torch.dtype

    @not_compiled_alone
    def __call__(self, _module: nn.Module, _args: object, output: Any) -> Any:
        """Give what the call of the module returns."""
        return cast_floats(output, self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return _out_of_file, (type(self), self.dtype, RemovableHandle.next_id)


def _out_of_file(cls: Any, dtype: torch.dtype, next_id: int) -> Any:
    # PyTorch numbers hooks from 0 in each process. A model out of a file has its hooks under the numbers of another
    # process, and one that is added here would take the place of ours.
    RemovableHandle.next_id = max(RemovableHandle.next_id, next_id)
    return cls(dtype)


def put_casts(model: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
    """Put the casts on a model, in the place of those that it has.

    Hooks of the user's that are there already are run with the arguments as they come, and with the outputs that are cast.

    Args:
        model: The model. Not to be called while another thread runs it.
        inputs: The dtype of its arguments; None leaves them as they come.
        outputs: The dtype of its outputs; None leaves them.

    Example:
        >>> model = nn.ReLU()
        >>> put_casts(model, None, torch.float64)
        >>> model(torch.ones(1)).dtype
        torch.float64
    """
    _drop(CastInputs, model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs)
    _drop(CastOutputs, model._forward_hooks, model._forward_hooks_with_kwargs)
    if inputs is not None:
        model.register_forward_pre_hook(CastInputs(inputs), with_kwargs=True)
    if outputs is not None:
        model.register_forward_hook(CastOutputs(outputs), prepend=True)


def _drop(kind: type, hooks: dict[int, Any], with_kwargs: dict[int, bool]) -> None:
    for key in [key for key, hook in hooks.items() if isinstance(hook, kind)]:
        del hooks[key]
        with_kwargs.pop(key, None)
