"""`autocast`: the transformation, from a function to the same function in mixed precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Never, ParamSpec, TypeVar, overload

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from mezzo.builtin import PolicyLike
from mezzo.errors import OptionError

from . import calls, custom_rules, loops  # noqa: F401 - each says which primitives it enters
from .arguments import Arguments, Traced, split_arguments, trace
from .internals import Aval, as_weak, aval_of
from .interpreter import interpret
from .kernels import Context
from .observing import current_observer
from .scopes import disabled, rewritten
from .settings import CustomVjp, Settings, make_settings
from .values import FLOAT32, Storage, Value, cast, dtype_of, is_float

__all__ = ["autocast"]

P = ParamSpec("P")
R = TypeVar("R")


@overload
def autocast(
    fn: Callable[P, R],
    dtype: Any = ...,
    *,
    policy: PolicyLike | None = ...,
    carry: Literal["pin", "fixpoint"] = ...,
    while_: Literal["off", "body"] = ...,
    custom_vjp: CustomVjp = ...,
    bias: Literal["adapt", "promote"] = ...,
    outputs: Literal["traced", "flow", "float32"] = ...,
    enabled: bool = ...,
) -> Callable[P, R]: ...


@overload
def autocast(
    fn: None = None,
    dtype: Any = ...,
    *,
    policy: PolicyLike | None = ...,
    carry: Literal["pin", "fixpoint"] = ...,
    while_: Literal["off", "body"] = ...,
    custom_vjp: CustomVjp = ...,
    bias: Literal["adapt", "promote"] = ...,
    outputs: Literal["traced", "flow", "float32"] = ...,
    enabled: bool = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def autocast(
    fn: Callable[..., Any] | None = None,
    dtype: Any = "bfloat16",
    *,
    policy: PolicyLike | None = None,
    carry: Literal["pin", "fixpoint"] = "pin",
    while_: Literal["off", "body"] = "off",
    custom_vjp: CustomVjp = "opaque",
    bias: Literal["adapt", "promote"] = "adapt",
    outputs: Literal["traced", "flow", "float32"] = "traced",
    enabled: bool = True,
) -> Any:
    """Make a function compute in mixed precision: products in lower precision, what needs range or digits in float32.

    The function is traced in its own dtypes, and its program rewritten: each primitive gets its inputs in the dtype that
    the policy says, inside of jitted functions, loops, branches, checkpoints and shards too. What comes back has the
    dtypes that ``fn`` itself would give. Parameters stay float32, and so do their gradients: each use of a weight is cast
    by itself, so that gradients of all uses add up in float32.

    It composes with ``jax.jit``, ``grad``, ``vmap`` and the rest, on either side. Recommended is
    ``jax.jit(jax.value_and_grad(autocast(loss)))``. Without ``jit`` outside, ``fn`` is traced at each call. Where one
    autocast is inside of another, the inner one decides.

    Args:
        fn: The function: a loss, a model's apply, a layer. Arrays among its arguments are traced; all else, Python numbers
            too, stays as it is.
            Without it, a decorator is returned.
        dtype: ``"bfloat16"`` or ``"float16"``, or that dtype. float16 needs a `GradScaler`.
        policy: Which primitive runs in which dtype: a `mezzo.Policy` for framework ``"jax"``, a built-in name or the path
            of a ``.toml`` file. None is ``"default"``; ``mezzo ops --framework jax`` prints it.
        carry: Dtypes of loop carries: ``"pin"`` keeps those of the trace, so that sums over a loop are float32;
            ``"fixpoint"`` finds the lowest that fit together.
        while_: ``"off"`` leaves `jax.lax.while_loop` alone: most are solvers with a tolerance that lower precision never
            reaches. ``"body"`` enters the body. The condition is never touched.
        custom_vjp: ``"opaque"`` leaves functions with a `jax.custom_vjp` alone, in exactly the dtypes they were written
            for; ``"enter"`` rewrites them and their rules; a mapping says it for functions by name. A name that
            no function has changes nothing; `explain` shows the names.
        bias: ``"adapt"``: a stored float32 array that is broadcast against a lower-precision activation (a bias, a scale)
            takes its dtype, as hand-written code has it; its gradient is added up in float32. ``"promote"``: the result is
            float32, as in PyTorch.
        outputs: ``"traced"``: results have the dtypes that ``fn`` gives without autocast. ``"flow"``: as they come out.
            ``"float32"``: as they come out, those in lower precision cast to float32.
        enabled: False runs ``fn`` as in `disabled`: an exception inside of a function that is autocast.

    Returns:
        A function with the arguments and results of ``fn``. Threads may share it.

    Raises:
        DtypeError: The dtype is not one of the two.
        OptionError: An option has another value, or ``fn`` cannot be called.
        PolicyError, UnknownPolicyError, UnknownOpError, PolicyFileError: The policy is none, or not one for JAX.

    The function raises:
        ArrayTypeError: An argument is an array of another framework, or a result is no array.
        MutationError: ``fn`` changes the state of a Flax NNX module, which would be lost.
        BannedOpError: The policy bans a primitive that ``fn`` uses.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from mezzo.jax import autocast
        >>> @autocast
        ... def loss(w, x):
        ...     return jnp.mean(jax.nn.softmax(x @ w) ** 2)
        >>> w, x = jnp.ones((4, 3)), jnp.ones((2, 4))
        >>> value, gradient = jax.jit(jax.value_and_grad(loss))(w, x)
        >>> value.dtype, gradient.dtype
        (dtype('float32'), dtype('float32'))
        >>> "bf16" in str(jax.make_jaxpr(loss)(w, x))
        True

    Source: the semantics are those of PyTorch's autocast
    (https://docs.pytorch.org/docs/stable/amp.html), on JAX's primitives.
    """
    settings = make_settings(
        dtype, policy, carry=carry, while_=while_, custom_vjp=custom_vjp, bias=bias, outputs=outputs
    )
    if not isinstance(enabled, bool):
        msg = f"enabled={enabled!r} is not allowed; allowed are True, False."
        raise OptionError(msg)

    decorator = _Decorator(settings, enabled)
    return decorator if fn is None else decorator(fn)


@dataclass(frozen=True)
class _Decorator:
    """What ``autocast`` without a function gives: called with one, it transforms it."""

    settings: Settings
    enabled: bool

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        return _transformed(fn, self.settings, enabled=self.enabled)

    def __enter__(self) -> Never:
        msg = (
            "autocast is no context manager in JAX: what runs in a `with` block cannot be seen there. It is a "
            "transformation such as jax.jit: loss = autocast(loss), or @autocast(dtype='bfloat16') above a function."
        )
        raise OptionError(msg)

    def __exit__(self, *raised: object) -> None:
        """Make it a context manager for `with`, which looks for both methods first."""


def _transformed(fn: Callable[P, R], settings: Settings, *, enabled: bool) -> Callable[P, R]:
    if not callable(fn) or _is_dtype(fn):
        msg = (
            f"autocast takes a function, got {getattr(fn, '__name__', type(fn).__name__)}. It is a transformation "
            "such as jax.jit: loss = autocast(loss), or @autocast(dtype='bfloat16') above it."
        )
        raise OptionError(msg)

    @functools.wraps(fn)
    def autocast_fn(*args: P.args, **kwargs: P.kwargs) -> Any:
        if not enabled:
            with disabled():
                return fn(*args, **kwargs)
        return _call(fn, settings, split_arguments(args, kwargs))

    transformed: Callable[P, R] = autocast_fn
    return transformed


def _is_dtype(thing: object) -> bool:
    """Say whether a callable is a scalar type, such as ``jnp.bfloat16``."""
    return isinstance(thing, type(jnp.float32)) or (isinstance(thing, type) and issubclass(thing, np.generic))


def _call(fn: Callable[..., Any], settings: Settings, arguments: Arguments) -> Any:
    name = getattr(fn, "__name__", type(fn).__name__)
    observer = current_observer()
    with nullcontext() if observer is None else observer.tracing():
        traced = trace(fn, arguments, name)
    record = None if observer is None else observer.region(name, settings, traced.closed)
    inputs = [Value(array, storage=Storage.SAME) for array in arguments.arrays]
    with rewritten():
        results = interpret(traced.closed.jaxpr, traced.closed.consts, inputs, Context(settings, record))
        arrays = _outputs(results, traced, settings)
    return jax.tree.unflatten(traced.tree, arrays)


def _outputs(results: Sequence[Value], traced: Traced, settings: Settings) -> list[Any]:
    return [_output(value.array, aval, settings) for value, aval in zip(results, traced.closed.out_avals, strict=True)]


def _output(array: Any, aval: Aval, settings: Settings) -> Any:
    if not isinstance(array, jax.Array):
        # A literal that is returned: a scalar of NumPy or Python up to here.
        number = np.asarray(array)
        return jnp.asarray(number.item()) if aval.weak_type else jnp.asarray(number, aval.dtype)
    if settings.outputs == "flow" or not is_float(dtype_of(array)):
        return array
    if settings.outputs == "float32":
        return cast(array, FLOAT32)
    array = cast(array, dtype_of(aval))
    weak = aval_of(array).weak_type
    if aval.weak_type and not weak:
        return as_weak(array)
    return lax.convert_element_type(array, array.dtype) if weak and not aval.weak_type else array
