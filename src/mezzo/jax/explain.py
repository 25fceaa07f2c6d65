"""`explain`: what autocast does to a function, equation by equation, without running it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from mezzo.errors import OptionError
from mezzo.report import Finding, Region, Report, Residuals

from .autocast import autocast
from .event_records import in_order, records_of
from .findings import findings_of
from .internals import ClosedJaxpr, closed_as_function, name_stack_text, with_constants_as_inputs
from .invisible_casts import CastWatch, InvisibleCast, marker_number
from .lost_casts import is_marker, lost_casts
from .observing import Event, observe
from .residuals import compare
from .settings import Settings

__all__ = ["explain"]

_tokens = itertools.count()
_TRACED = (
    "mezzo.jax.explain traces the function as jax.jit does, and computes nothing. Give it what you would give jax.jit: the "
    "loss or the step, not the code around them that looks at numbers."
)


def explain(fn: Callable[..., Any], **options: Any) -> Callable[..., Report]:
    """Explain what autocast does to a function: which op runs in which dtype and why, casts, memory, and what to look at.

    The function is traced and not run: no number is computed, nothing is compiled. Functions that ``jax.jit`` has compiled
    already are traced anew for the report, and stay compiled.

    Args:
        fn: A function that is autocast, or one with autocast somewhere inside, such as
            ``jax.jit(jax.value_and_grad(autocast(loss)))`` or a whole train step; each application of autocast is a region
            of the report. If there is none inside, ``autocast(fn, **options)`` is explained.
        **options: Those of `autocast`, for a function without it.

    Returns:
        A function with the arguments of ``fn``, which gives a `mezzo.report.Report`. Arrays among its arguments may be
        ``jax.ShapeDtypeStruct`` too.

    Raises:
        OptionError: ``fn`` cannot be called, or an option is wrong. The function that is returned raises it too, if options
            are given and ``fn`` applies autocast itself; and whatever ``fn`` raises while it is traced, such as
            ``jax.errors.ConcretizationTypeError`` if it looks at numbers.

    What the report says:

    * Each equation of a region, in the order of the program, with its rule, why that is not the policy's, dtypes as traced,
      as they came and as they were used, and the user's line.
    * Casts that autocast put in front of equations. Those at the ends of loops, branches and of the whole are not counted,
      nor literals, which take a dtype while they are traced.
    * What the backward pass needs: the bytes that ``jax.vjp`` keeps, by all float arguments of the region, with autocast
      and without. A loop keeps what it needs of each step. Arguments that are kept anyway count too.
    * Warnings: products that stay in float32, functions left alone, unknown primitives, and casts to float32 that were
      lost. ``x.astype(jnp.float32)`` leaves no equation if ``x`` is traced as float32, so that no rewrite can honour it;
      they are found by watching calls while ``fn`` is traced. It warns if the value is in lower precision and something
      other than a product, a multiplication by one number, or an op that casts to float32 itself computes with it.

    The backward pass of ``jax.grad(autocast(f))`` is made by JAX after the rewrite, and has no records of its own: it runs
    in the dtypes of the equations whose transpose it is. In ``autocast(jax.grad(f))`` it has.

    Threads may explain at once. While it traces a region, a profile function that is set in this thread by
    ``sys.setprofile`` rests.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from mezzo.jax import autocast, explain
        >>> @autocast
        ... def loss(w, x):
        ...     return jnp.mean(jax.nn.softmax(x @ w) ** 2)
        >>> report = explain(jax.jit(jax.value_and_grad(loss)))(jnp.ones((4, 3)), jnp.ones((2, 4)))
        >>> print(report.dots[0])
        bfloat16 x bfloat16 -> bfloat16: 1
        >>> [row["op"] for row in report.where(rule="fp32").rows()]
        ['exp', 'reduce_sum', 'reduce_sum']
        >>> report.warnings
        ()
    """
    if not callable(fn):
        msg = f"explain takes a function, got {type(fn).__name__}: explain(loss)(params, batch)."
        raise OptionError(msg)
    own = autocast(fn, **options)

    def explained(*args: Any, **kwargs: Any) -> Report:
        seen = _watch(fn, args, kwargs)
        if seen.regions and options:
            named = ", ".join(options)
            msg = f"explain was given {named}, and {_name(fn)} applies autocast itself: give the options to that autocast."
            raise OptionError(msg)
        if seen.regions:
            return _report(_name(fn), seen)
        return _report(_name(fn), _watch(own, args, kwargs), _HYPOTHETICAL)

    return functools.wraps(fn)(explained)


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))


# Watching


@dataclass
class _Seen:
    """What was seen of one application of autocast."""

    name: str
    settings: Settings
    traced: ClosedJaxpr
    events: list[Event] = field(default_factory=list)


class _Watching:
    """The observer: keeps the events of each application of autocast."""

    def __init__(self) -> None:
        self.regions: list[_Seen] = []
        self.watch = CastWatch()

    def tracing(self) -> CastWatch:
        """Have casts watched: only while a region's function is traced, as all that runs meanwhile takes longer."""
        return self.watch

    def region(self, name: str, settings: Settings, traced: ClosedJaxpr) -> Callable[[Event], None]:
        """Begin a region."""
        self.regions.append(_Seen(name, settings, traced))
        return self.regions[-1].events.append


def _watch(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Watching:
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if _is_array(leaf)]

    def call(*arrays: Any) -> None:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        positional, named = jax.tree.unflatten(tree, filled)
        fn(*positional, **named)

    watching = _Watching()
    with _traced_anew(), observe(watching):
        try:
            jax.eval_shape(call, *(leaves[place] for place in places))
        except jax.errors.JAXTypeError as error:
            error.add_note(_TRACED)
            raise
    return watching


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


@contextmanager
def _traced_anew() -> Iterator[None]:
    """Have JAX trace functions again that it has traced before, and let it forget nothing.

    What is traced depends on the metadata that is in force, so JAX looks for a trace with this one, and finds none. The
    metadata ends up in no program: nothing that is traced here is compiled.
    """
    with set_xla_metadata(mezzo_explain=f"{next(_tokens)}"):
        yield


# Reporting


_HYPOTHETICAL = "no autocast was met in this function: the report is of autocast(fn), and as it stands nothing is cast"


def _report(title: str, seen: _Watching, *remarks: str) -> Report:
    notes, watch = [*remarks], seen.watch
    if not watch.works:
        notes.append("casts that leave no equation were not looked for: a profiler is running in this thread")
    counts: dict[Region, int] = {}
    for one in seen.regions:
        region = _region(one, watch.found)
        counts[region] = counts.get(region, 0) + 1
    hidden = _unmarked(seen, watch.found)
    if hidden:
        places = ", ".join(dict.fromkeys(f"{cast.spelling} at {cast.source}" for cast in hidden))
        notes.append(f"casts to float32 of values whose dtype under autocast could not be followed: {places}")
    regions = tuple(replace(region, count=count) for region, count in counts.items())
    return Report(title, "jax", regions, tuple(notes))


def _region(seen: _Seen, casts: list[InvisibleCast]) -> Region:
    events = in_order(seen.events)
    records = tuple(records_of(events))
    findings = Finding.merge([*findings_of(records), *lost_casts(events, casts)])
    return Region(seen.name, _settings(seen.settings), records, findings, _residuals(seen, events))


def _unmarked(seen: _Watching, casts: list[InvisibleCast]) -> list[InvisibleCast]:
    """Find the casts whose marker JAX dropped, as it drops what has no use when it takes derivatives of jitted functions."""
    events = (event for region in seen.regions for event in region.events if is_marker(event))
    kept = {marker_number(event.eqn.params["name"]) for event in events}
    return [cast for number, cast in enumerate(casts) if number not in kept]


def _settings(settings: Settings) -> dict[str, str]:
    chosen = {"dtype": settings.dtype, "policy": settings.policy.name}
    for option in fields(settings):
        value = getattr(settings, option.name)
        if option.name not in chosen and value != option.default:
            chosen[option.name] = value if isinstance(value, str) else str(dict(value))
    return chosen


def _residuals(seen: _Seen, events: list[Event]) -> Residuals:
    if any("transpose(" in name_stack_text(event.eqn.source_info.name_stack) for event in events):
        return Residuals(None, None, "a backward pass is inside of the region already")
    jaxpr = with_constants_as_inputs(seen.traced)
    plain = closed_as_function(ClosedJaxpr(jaxpr, ()))
    # What the function closes over is differentiated by if that is what a transformation around it does.
    fixed = [place for place, one in enumerate(seen.traced.consts) if not isinstance(one, jax.core.Tracer)]
    arguments = [variable.aval for variable in jaxpr.invars]
    return compare(plain, _lowered(plain, seen.settings), arguments, fixed)


def _lowered(plain: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    options = {option.name: getattr(settings, option.name) for option in fields(settings)}
    if not isinstance(settings.custom_vjp, str):
        options["custom_vjp"] = dict(settings.custom_vjp)
    lowered: Callable[..., Any] = autocast(plain, **options)
    return lowered
