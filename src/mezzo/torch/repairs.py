"""Repairs: a call that fails over dtypes is made again in dtypes that the op has a kernel for.

A policy with `repairs` lets a call run as its rule says. Only if that raises over dtypes is it mended, in one of these ways:

* inputs of different dtypes: as if all had come in the widest dtype, float64 included; the order has no influence;
* a write into a tensor (in place, or ``out=``): the other inputs are cast to that tensor's dtype;
* a lower-precision dtype that the op has no kernel for: in float32.

So a call that works gives what it gives without repairs, and repairs cost nothing until one is needed. If nothing helps,
PyTorch's own error is raised. Which ops can need one is data (``tables/torch/repairs.csv``), found by
``scripts/find_repairs.py``.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import MezzoError
from mezzo.torch.casting import Device
from mezzo.torch.ops import OpSpec
from mezzo.torch.switch import KEY

__all__ = ["DTYPE_ERRORS", "Repair", "concerns_dtypes", "noted_attempts", "inside"]

DTYPE_ERRORS = (RuntimeError, TypeError, ValueError)
"""The types of errors that PyTorch's ops raise over dtypes, among other things."""

_ABOUT_DTYPES = re.compile(
    r"dtype|scalar ?type|not implemented for|same type|input type|primitive descriptor"
    r"|\b(c10::)?(half|bfloat16|float|double|float16|float32|float64)\b",
    re.IGNORECASE,
)

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class _Inside(threading.local):
    """In how many ops that can be repaired a thread is, with the ops inside them coming to mezzo too.

    The outermost op is repaired, not those inside of it: a functional op that writes into a copy of its input would cast to
    the dtype of that, where the widest dtype is wanted, and a cast below autograd would be missing in the backward pass.

    Attributes:
        depth: How many.
    """

    depth = 0


inside = _Inside()


def concerns_dtypes(error: BaseException) -> bool:
    """Say whether an error that an op has raised is about dtypes.

    Example:
        >>> concerns_dtypes(RuntimeError("expected m1 and m2 to have the same dtype, but got: float != double"))
        True
        >>> concerns_dtypes(RuntimeError("mat1 and mat2 shapes cannot be multiplied (1x2 and 3x4)"))
        False
    """
    return not isinstance(error, MezzoError) and _ABOUT_DTYPES.search(str(error)) is not None


class Repaired:
    """Whether any call of this process has been repaired so far: for those who could do without a look at calls."""

    ever = False


class _NotedAttempts(threading.local):
    """By op, the number of the attempt that was the last one; None while nobody asks (`mezzo.torch.probing` does)."""

    numbers: dict[str, int] | None = None


noted_attempts = _NotedAttempts()


class Repair:
    """What is tried when a call of one op has failed over dtypes.

    Args:
        spec: The op.
        device: Where it runs; only tensors there are cast.
        call: Calls the op.
    """

    __slots__ = ("_call", "_device", "_spec")

    def __init__(self, spec: OpSpec, device: Device, call: Callable[..., Any]) -> None:
        self._spec = spec
        self._device = device
        self._call = call

    def mend(self, fault: BaseException, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call that has failed in other dtypes.

        Args:
            fault: The error that it raised.
            run: Makes the call again, by the op's rule.
            args: The positional arguments as they came.
            kwargs: The keyword arguments as they came.

        Returns:
            The op's result.

        Raises:
            RuntimeError: ``fault`` itself if it is not about dtypes or nothing helps; the error of a later attempt if that
                one is about something else, such as a shape that PyTorch only looks at once the dtypes fit.
        """
        if concerns_dtypes(fault):
            for number, attempt in enumerate(self._attempts(run, args, kwargs), 1):
                try:
                    result = attempt()
                except DTYPE_ERRORS as error:
                    if concerns_dtypes(error):
                        continue
                    self._note(number)
                    raise error from None
                self._note(number)
                Repaired.ever = True
                return result
        raise fault

    def attempt(self, number: int, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make just one of the calls that `mend` makes until one works.

        Args:
            number: Which one, counted from 1.
            run: Makes the call by the op's rule.
            args: The positional arguments as they came.
            kwargs: The keyword arguments as they came.

        Returns:
            The op's result.
        """
        return next(islice(self._attempts(run, args, kwargs), number - 1, None))()

    @property
    def device(self) -> str:
        """The type of the device on which tensors are cast."""
        return self._device.type

    def _note(self, number: int) -> None:
        if noted_attempts.numbers is not None:
            noted_attempts.numbers[self._spec.name] = number

    def is_mixed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Say whether the floating tensors among arguments have different dtypes."""
        return len({tensor.dtype for tensor in self._floating(tuple(args), kwargs)}) > 1

    def through_copies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call in the widest dtype, on copies of what it writes into."""
        Repaired.ever = True
        dtypes = {tensor.dtype for tensor in self._floating(args, kwargs)}
        return self._through_copies(args, kwargs, _widest({*dtypes, torch.float32}))

    def promoted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the arguments with every floating tensor in the widest of their dtypes, if there will be a backward pass."""
        found = list(self._floating(args, kwargs))
        dtypes = {tensor.dtype for tensor in found}
        if len(dtypes) < 2 or not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in found):
            return args, kwargs
        Repaired.ever = True
        return self._cast(args, kwargs, _widest(dtypes), ())

    def _attempts(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Callable[[], Any]]:
        dtypes = {tensor.dtype for tensor in self._floating(args, kwargs)}
        if not dtypes:
            return
        if self._spec.name in _NORMS and args[0].is_nested:
            yield partial(self._norm_of_nested, args, kwargs)
        written, state = self._written(args, kwargs), self._state(args)
        if state or len({tensor.dtype for tensor in written}) > 1:
            # In one dtype or not at all: PyTorch does not check the dtypes of running statistics everywhere.
            for target in {_widest(dtypes): 0, _widest({*dtypes, torch.float32}): 0}:
                yield partial(self._through_copies, args, kwargs, target)
            return
        target = written[0].dtype if written else _widest(dtypes)
        same_args, same_kwargs = args, kwargs
        if dtypes - {target}:
            same_args, same_kwargs = self._cast(args, kwargs, target, written)
            yield partial(run, same_args, same_kwargs)
        # Past the op's rule: PyTorch's promote kernels do not take float16 in a bfloat16 region, or the other way round.
        yield partial(self._plainly, same_args, same_kwargs)
        if written or torch.float64 not in dtypes:
            yield partial(self._through_copies, args, kwargs, _widest({*dtypes, torch.float32}))

    def _floating(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, list | tuple) else (value,):
                if self._is_castable(item):
                    yield item

    def _is_castable(self, value: object) -> bool:
        if not isinstance(value, Tensor):
            return False
        fits = value.is_floating_point() or value.is_complex()
        return fits and value.device.type == self._device.type

    def _written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Give the floating tensors that the op writes into."""
        values = [args[place] for place in self._spec.written if place < len(args)]
        values += [kwargs[name] for name in self._spec.written_keywords if name in kwargs]
        return list(self._floating(tuple(values), {}))

    def _cast(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: torch.dtype, kept: list[Tensor] | tuple[()]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast every floating tensor but those that are kept."""
        kept_ids = {id(tensor) for tensor in kept}

        def cast(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [cast(item) for item in value]
            if not self._is_castable(value) or id(value) in kept_ids:
                return value
            return value.to(_fitting(value.dtype, target))

        return tuple(cast(value) for value in args), {name: cast(value) for name, value in kwargs.items()}

    def _state(self, args: tuple[Any, ...]) -> list[Any]:
        return [args[place] for place in self._spec.state if place < len(args) and isinstance(args[place], Tensor)]

    def _plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op, and all that is in it, as if there were no autocast."""
        exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
        is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
        keys = [key for key in (self._device.key, KEY) if not is_excluded(key)]
        for key in keys:
            exclude(key, True)
        try:
            return self._call(*args, **kwargs)
        finally:
            for key in keys:
                exclude(key, False)

    def _through_copies(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: torch.dtype) -> Any:
        """Run the op, and all that is in it, in one dtype; what it writes and updates goes through copies."""
        written = self._written(args, kwargs)
        copies = {id(tensor): tensor.to(target) for tensor in (*written, *self._state(args))}

        def replaced(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [replaced(item) for item in value]
            return copies.get(id(value), value) if isinstance(value, Tensor) else value

        wide_args, wide_kwargs = self._cast(
            tuple(replaced(value) for value in args),
            {name: replaced(value) for name, value in kwargs.items()},
            target,
            list(copies.values()),
        )
        result = self._plainly(wide_args, wide_kwargs)
        originals = {}
        for tensor in (*written, *self._state(args)):
            copy = copies[id(tensor)]
            originals[id(copy)] = tensor
            _write(tensor, copy, resizes=bool(self._spec.written_keywords))
        # What the op gives back of what it was given has to be what came.
        if isinstance(result, list | tuple):
            return type(result)(originals.get(id(item), item) for item in result)
        return originals.get(id(result), result)

    def _norm_of_nested(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Normalize a nested tensor as PyTorch does a dense one: in float32 inside, with the result in the input's dtype.

        A `torch.nn.TransformerEncoder` with a padding mask does this in its fused inference path.
        """
        wide_args, wide_kwargs = self._cast(args, kwargs, torch.float32, ())
        result = self._plainly(wide_args, wide_kwargs)
        if isinstance(result, Tensor):
            return result.to(args[0].dtype)
        return (result[0].to(args[0].dtype), *result[1:])


_NORMS = ("aten::layer_norm", "aten::native_layer_norm")


def _write(tensor: Tensor, copy: Tensor, *, resizes: bool) -> None:
    if copy is tensor:
        return
    if resizes:
        # While code is traced, a tensor that an op has resized goes on to tell its old shape; an alias tells the new one.
        copy = copy.detach()
        if tensor.shape != copy.shape:
            tensor.resize_(copy.shape)
    tensor.copy_(copy)


def _widest(dtypes: set[torch.dtype]) -> torch.dtype:
    computed = {torch.float32 if dtype.itemsize == 1 else dtype for dtype in dtypes}
    return reduce(torch.promote_types, computed)


def _fitting(dtype: torch.dtype, target: torch.dtype) -> torch.dtype:
    """Give the dtype to cast to: real tensors stay real next to a complex destination, and complex ones complex."""
    return target.to_complex() if dtype.is_complex and not target.is_complex else target
