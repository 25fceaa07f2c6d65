"""A stand-in accelerator written in Python: its name is "standin", and it computes on the CPU.

Importing this module puts the device in place: ``torch.ones(2, device="standin")`` works from then on, as do modules,
autograd, optimizers, views, copies and random numbers. It is there so that the example and the tests of new
accelerators need no hardware and no compiler. A real backend has all this already, in C++ or in Python of its own.

It claims PyTorch's PrivateUse1 slot, which a process can do once, and stands on
``torch.utils.backend_registration._setup_privateuseone_for_python_backend``, which PyTorch 2.13 has and calls
experimental. A tensor here is a wrapper with a device storage that holds no data; the memory behind it is a CPU
storage that hangs on the device storage. So views, ``.data`` and detached tensors share memory as they do elsewhere.

Kernels that are registered for PrivateUse1 with ``torch.library`` win over the stand-in's. It has none for the two
ops that a gradient scaler needs, and no ``get_amp_supported_dtype``: what AMP wants is left to whoever adds AMP.
It does strided real tensors on one device, ``standin:0``, and refuses complex and sparse ones. A limit of PyTorch 2.13:
an exception in a tensor's hook, in a backward pass on any device made this way, ends the process.
"""

# Names with underscores and flags given by position are PyTorch's:
# ruff: noqa: SLF001, FBT001, FBT002, FBT003

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from standin_calls import Call, calls, note
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

__all__ = ["NAME", "Call", "StandinModule", "StandinTensor", "calls"]

NAME = "standin"

_aten = torch.ops.aten
_CPU_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
_LACKING = {_aten._amp_foreach_non_finite_check_and_unscale_.default, _aten._amp_update_scale_.default}


class StandinTensor(torch.Tensor):
    """A tensor of the device: sizes and strides here, numbers in the CPU storage behind its storage."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op on tensors of the device, some of them perhaps of the CPU."""
        if not all(issubclass(one, cls) for one in types):
            return NotImplemented
        return _run(func, tuple(args), dict(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Show the numbers, and say where they are."""
        return repr(self.detach().cpu())[:-1] + f", device='{self.device}')"

    def __format__(self, spec: str) -> str:
        """Format a tensor without dimensions as a number, as other tensors do."""
        return format(self.detach().cpu(), spec) if spec else repr(self)

    def tolist(self) -> Any:
        """Give the numbers as Python numbers, in lists."""
        return self.detach().cpu().tolist()

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Pickle by way of the CPU."""
        return _unpickle, (self.detach().cpu(), self.requires_grad, isinstance(self, torch.nn.Parameter))


def _unpickle(numbers: Tensor, requires_grad: bool, is_parameter: bool) -> Tensor:
    there = numbers.to(NAME)
    return torch.nn.Parameter(there, requires_grad) if is_parameter else there.requires_grad_(requires_grad)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.PrivateUse1):
        own = torch.library.get_kernel(func, "PrivateUse1")
        out = own.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1), *args, **kwargs)
        note(func, tree_leaves((args, kwargs)), stays=True, out=out)
        return out
    if func in _LACKING:
        msg = f"Could not run '{func.name()}' with arguments from the '{NAME}' backend: it has no kernel for this op."
        raise NotImplementedError(msg)
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose(*args, **kwargs)  # in inference mode such an op comes here in one piece
    return _compute(func, args, kwargs)


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one op on the memory behind its arguments."""
    _check_devices(func, args, kwargs)
    stays = kwargs.get("device") is None or torch.device(kwargs["device"]).type == NAME
    if "device" in kwargs and stays:
        kwargs["device"] = torch.device("cpu")
    leaves, spec = tree_flatten((args, kwargs))
    behind = [_behind(leaf) for leaf in leaves]
    on_cpu_args, on_cpu_kwargs = tree_unflatten(behind, spec)
    random = _random.in_force() if torch.Tag.nondeterministic_seeded in func.tags else nullcontext()
    # No rule of the CPU's autocast is to change what the device does.
    with torch._C._ExcludeDispatchKeyGuard(_CPU_AUTOCAST), random:
        out = func(*on_cpu_args, **on_cpu_kwargs)
    if stays:
        sharing = _Sharing(leaves, behind)
        out = tree_map_only(Tensor, sharing.lift, out)
        if func._schema.is_mutable:
            sharing.follow()
        if func._schema.is_mutable and func.name().startswith("aten::_foreach_"):
            # For other ops PyTorch counts; kernels of these count themselves.
            torch.autograd.graph.increment_version([one for one in args[0] if not one.is_inference()])
    note(func, leaves, stays=stays, out=out)
    return out


def _check_devices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what PyTorch raises for tensors of two devices; a CPU tensor without dimensions may come along."""
    if func in _COPIES:
        return
    for place, argument in enumerate(func._schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        if func in _INDEXING and argument.name == "indices":
            continue
        for tensor in tree_leaves(given):
            if isinstance(tensor, StandinTensor) or not isinstance(tensor, Tensor):
                continue
            if tensor.device.type != "cpu" or tensor.dim() or written:
                msg = (
                    f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and "
                    f"{tensor.device}! (when checking argument {argument.name} of {func.name()})"
                )
                raise RuntimeError(msg)


def _behind(leaf: Any) -> Any:
    """Return the CPU tensor whose numbers `leaf` shows, or `leaf` if it is no tensor of the device."""
    if not isinstance(leaf, StandinTensor):
        return leaf
    memory = leaf.untyped_storage().memory  # type: ignore[attr-defined]
    return torch.empty(0, dtype=leaf.dtype).set_(memory, leaf.storage_offset(), leaf.size(), leaf.stride())


def _wrap(numbers: Tensor, storage: torch.UntypedStorage | None = None) -> Tensor:
    """Make a tensor of the device of a CPU tensor, on a storage of the device if it is a view."""
    if numbers.layout is not torch.strided or numbers.is_complex():
        msg = f"the {NAME} device has strided real tensors only, not {numbers.dtype} in {numbers.layout}"
        raise NotImplementedError(msg)
    memory = numbers.untyped_storage()
    wrapper = Tensor._make_wrapper_subclass(
        StandinTensor,
        numbers.size(),
        strides=numbers.stride(),
        storage_offset=numbers.storage_offset(),
        dtype=numbers.dtype,
        device=torch.device(NAME, 0),
        storage_size=memory.nbytes(),
    )
    if storage is None:
        wrapper.untyped_storage().memory = memory  # type: ignore[attr-defined]
    else:
        _show(wrapper, storage, numbers)
    return wrapper


def _show(wrapper: Tensor, storage: torch.UntypedStorage, like: Tensor) -> None:
    """Let `wrapper` show `storage` with the sizes and strides of `like`, without a kernel of the device."""
    before = torch._C._meta_in_tls_dispatch_include()
    with no_dispatch():
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            _aten.set_.source_Storage_storage_offset(
                wrapper, storage, like.storage_offset(), like.size(), like.stride()
            )
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)


class _Sharing:
    """Which arguments of an op lie on which memory: what comes out may be one of them, or a view of one."""

    def __init__(self, leaves: list[Any], behind: list[Any]) -> None:
        pairs = list(zip(leaves, behind, strict=True))
        self.tensors = [pair for pair in pairs if isinstance(pair[0], StandinTensor)]
        self.same = {id(numbers): leaf for leaf, numbers in pairs if isinstance(leaf, Tensor)}
        self.storages = {_memory(numbers): leaf.untyped_storage() for leaf, numbers in self.tensors}

    def lift(self, numbers: Tensor) -> Tensor:
        """Make what came out on the CPU a tensor of the device."""
        if id(numbers) in self.same:
            return self.same[id(numbers)]
        strided = numbers.layout is torch.strided
        return _wrap(numbers, self.storages.get(_memory(numbers)) if strided else None)

    def follow(self) -> None:
        """Let the tensors that an op resized or laid out anew (``t_``, ``set_``) show what is behind them now."""
        for tensor, numbers in self.tensors:
            if _layout(tensor) != _layout(numbers) or self.storages[_memory(numbers)] is not tensor.untyped_storage():
                _show(tensor, self.storages[_memory(numbers)], numbers)


def _memory(numbers: Tensor) -> int:
    cdata: int = numbers.untyped_storage()._cdata
    return cdata


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.size(), tensor.stride(), tensor.storage_offset()


class _Random:
    """The random state of the device, apart from the CPU's."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.state = torch.Generator().manual_seed(torch.initial_seed()).get_state()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let the CPU's kernels draw from the device's state."""
        with self.lock:
            of_cpu = torch.get_rng_state()
            torch.set_rng_state(self.state)
            try:
                yield
            finally:
                self.state = torch.get_rng_state()
                torch.set_rng_state(of_cpu)


_random = _Random()


class StandinModule(_DummyBackendModule):
    """What PyTorch looks for at ``torch.standin``: PyTorch's own dummy, one device, with random numbers added."""

    _initialized = True  # torch.utils.checkpoint looks at this before it saves the random state

    def device(self, index: Any) -> Any:  # noqa: ARG002
        """Make a context in which a device is in use; there is but one."""
        return nullcontext()

    def synchronize(self, device: Any = None) -> None:
        """Wait for the device; an op here is done when its call returns."""

    def manual_seed_all(self, seed: int) -> None:
        """Seed the device; ``torch.manual_seed`` calls this."""
        self.set_rng_state(torch.Generator().manual_seed(seed).get_state())

    def get_rng_state(self, device: Any = NAME) -> Tensor:  # noqa: ARG002
        """Return a copy of the random state."""
        return _random.state.clone()

    def set_rng_state(self, new_state: Tensor, device: Any = NAME) -> None:  # noqa: ARG002
        """Set the random state to one that `get_rng_state` gave."""
        with _random.lock:
            _random.state = new_state.clone()


_setup_privateuseone_for_python_backend(NAME, StandinModule())
_library = torch.library.Library("aten", "IMPL", "PrivateUse1")


def _empty(size: Sequence[int], *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return _wrap(torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format))


def _empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_: Any) -> Tensor:
    return _wrap(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _behind(target).copy_(_behind(source), non_blocking)
    note(_aten.copy_.default, [target, source], stays=True, out=target)
    return target


def _restore(_: Any, location: str) -> None:
    if location.startswith(NAME):
        msg = f"storages cannot be loaded straight to {NAME}: use map_location='cpu' and copy, as load_state_dict does"
        raise NotImplementedError(msg)


# All that makes tensors out of none ends in one of these two; every other op has a tensor of the device to come by.
_library.impl("empty.memory_format", _empty)
_library.impl("empty_strided", _empty_strided)
_library.impl("_copy_from", _copy_from)  # where PyTorch leaves out what a tensor's class would do: torch.tensor(...)

# PyTorch has no way to allocate a storage on a device without C++, and would crash on trying.
torch.serialization.register_package(0, lambda _: None, _restore)
torch.serialization.add_safe_globals([_unpickle])
