"""Which op of the policy's list is running, and by which rule it is cast.

A dispatch mode sees the kernels that run in the end: ``addmm`` where the program called ``linear``, whose rule it was that
cast. So while something watches, listed ops come through a kernel in front of all others first, which writes down that they
run. It is on a dispatch key on which nothing else of PyTorch's is, and which is off in every thread that nobody watches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mezzo import tables
from mezzo.decision import CastPolicy
from mezzo.policy import Policy
from mezzo.torch.active import Active, hear_of_entries, slot_for
from mezzo.torch.casting import dtype_name
from mezzo.torch.eager import runs_eagerly
from mezzo.torch.ops import NUMBERS, OpSpec, expand_rules, op_spec
from mezzo.torch.plans import device_rules
from mezzo.torch.switch import let_through
from mezzo.torch.watch_mode import FRONT_KEY, FRONT_KEY_NAME
from mezzo.vocabulary import base_name, vocabulary

from .memory_places import place_of

__all__ = ["Listed", "RuleHere", "listed_now", "listening", "region_now", "rule_here"]

_include = torch._C._dispatch_tls_set_dispatch_key_included


class RuleHere(NamedTuple):
    """What autocast does to an op here.

    Attributes:
        rule: The cast policy; None for an op that is not listed.
        policy: The name of the policy in force.
        low: The region's dtype.
        device: The device type.
    """

    rule: CastPolicy | None
    policy: str
    low: torch.dtype
    device: str


class Listed:
    """A call of an op under watch.

    Attributes:
        spec: The op.
        here: What autocast does to it; None if it is off.
        is_ruled: Whether a rule of the policy casts it, or leaves it and the ops inside alone.
        tensors: Its tensor arguments.
        cast_to: For each of these the dtype that it was cast to, as far as that was seen.
        notes: What listeners write down for themselves.
    """

    __slots__ = ("cast_to", "here", "is_ruled", "notes", "spec", "tensors")

    def __init__(self, spec: OpSpec, here: RuleHere | None, tensors: list[Tensor]) -> None:
        self.spec = spec
        self.here = here
        self.is_ruled = here is not None and here.rule is not None
        self.tensors = tensors
        self.cast_to: list[torch.dtype | None] = [None] * len(tensors)
        self.notes: dict[object, Any] = {}

    def is_cast(self, source: Tensor, to: torch.dtype) -> None:
        """Take down that a tensor is cast inside of the op, which may be one of its arguments."""
        place = place_of(source)
        for number, tensor in enumerate(self.tensors):
            if tensor is source or (tensor.dtype is source.dtype and place[1] and place_of(tensor) == place):
                self.cast_to[number] = to


class Listener(Protocol):
    """What hears of ops that a rule casts."""

    def ends(self, listed: Listed, result: Any) -> None:
        """One has given its result."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[Listed] = []
        self.listeners: list[Listener] = []
        self.last: RuleHere | None = None


_thread = _Thread()
_lock = threading.RLock()
_in_front: set[str] = set()
_libraries: dict[str, torch.library.Library] = {}


def listed_now() -> Listed | None:
    """Give the op under watch that runs in this thread, the innermost; None if none does."""
    running = _thread.running
    return running[-1] if running else None


def region_now(device_type: str) -> RuleHere | None:
    """Give the state of autocast for what runs in this thread, as far as it is known; None if it is off.

    A dispatch mode runs where all of autocast is off already, so it goes by the op that is running, else by the last one.

    Args:
        device_type: Where the tensors are.
    """
    running = _thread.running
    if running:
        return running[-1].here
    # How many regions are open, enabled or not, is no matter of dispatch keys.
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    last = _thread.last
    return last if nesting and last is not None and last.device == device_type else None


def rule_here(op: str, device_type: str) -> RuleHere | None:
    """Say what autocast does to an op in this thread now.

    Args:
        op: Canonical name.
        device_type: Where its tensors are.

    Returns:
        The rule; None if autocast is off.
    """
    try:
        if not torch.is_autocast_enabled(device_type):
            return None
    except RuntimeError:  # a device type without autocast, such as meta
        return None
    low = torch.get_autocast_dtype(device_type)
    active = slot_for(device_type).current()
    return RuleHere(_rules(active, device_type, low).get(op), active.policy.name, low, device_type)


_known_rules: WeakKeyDictionary[Active, dict[tuple[str, torch.dtype], dict[str, CastPolicy]]] = WeakKeyDictionary()


def _rules(active: Active, device_type: str, low: torch.dtype) -> dict[str, CastPolicy]:
    known = _known_rules.setdefault(active, {})
    rules = known.get((device_type, low))
    if rules is None:
        rules = known[device_type, low] = _rules_of(active.policy, device_type, dtype_name(low))
        _put_in_front(rules)
    return rules


def _rules_of(policy: Policy, device_type: str, low: str) -> dict[str, CastPolicy]:
    own = device_rules(device_type, low)
    listed = expand_rules(policy.ops)
    rules: dict[str, CastPolicy] = {}
    for op in own.keys() | listed.keys() | (_computing() if policy.default not in _ALONE else set()):
        rule = policy.rule_of(op, low) if op not in listed else _by_dtype(listed[op], low)
        found = own.get(op) if rule == "device" else rule
        # With the latter as the default for what is not listed, the ops inside are cast by their own rules.
        if found is not None and (op in listed or found is not CastPolicy.FALLTHROUGH):
            rules[op] = CastPolicy(found)
    return rules


_ALONE = ("device", CastPolicy.FALLTHROUGH)


@cache
def _computing() -> set[str]:
    return {op for op, traits in vocabulary("torch").traits.items() if "compute" in traits}


def _by_dtype(rule: Any, low: str) -> CastPolicy:
    return getattr(rule, low, rule)  # type: ignore[no-any-return]


def _put_in_front(ops: Iterable[str]) -> None:
    missing = set(ops) - _in_front
    if not missing:
        return
    with _lock:
        if not _libraries:
            let_through(FRONT_KEY_NAME)
        for op in sorted(missing - _in_front):
            _in_front.add(op)
            spec = op_spec(op)
            if spec is not None:
                namespace, _, name = op.partition("::")
                library = _libraries.get(namespace)
                if library is None:
                    library = _libraries[namespace] = torch.library.Library(namespace, "IMPL")
                library.impl(name, _front_kernel(spec), FRONT_KEY_NAME, with_keyset=True)


def _front_kernel(spec: OpSpec) -> Callable[..., Any]:
    redispatch = spec.overload.redispatch
    after = torch._C._dispatch_keyset_full_after(FRONT_KEY)
    places = [place for place, _ in spec.tensors]
    with_numbers = _call_with_numbers(spec)

    @runs_eagerly
    def past(keyset: torch._C.DispatchKeySet, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(args[place].__class__ in NUMBERS for place in places if place < len(args)):
            # A redispatch does not take a number for a tensor. Elementwise ops: nothing listed is inside.
            _include(FRONT_KEY, False)
            try:
                return with_numbers(*args, **kwargs)
            finally:
                _include(FRONT_KEY, True)
        return redispatch(keyset & after, *args, **kwargs)

    @runs_eagerly
    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        thread = _thread
        running = thread.running
        # What is inside of an op that a rule casts is not cast again. And mezzo's kernels call an op once more from the top.
        if running and (running[-1].is_ruled or running[-1].spec is spec):
            return past(keyset, args, kwargs)
        tensors = _tensors(args, kwargs) if thread.listeners else None
        if not tensors:
            return past(keyset, args, kwargs)
        thread.last = here = rule_here(spec.name, tensors[0].device.type)
        listed = Listed(spec, here, tensors)
        running.append(listed)
        try:
            result = past(keyset, args, kwargs)
            if listed.is_ruled:
                for listener in thread.listeners:
                    listener.ends(listed, result)
        finally:
            running.pop()
        return result

    return kernel


def _call_with_numbers(spec: OpSpec) -> Callable[..., Any]:
    """Find a call that takes a Python number where a tensor stood for it, and treats it as PyTorch does."""
    if spec.takes_numbers:
        return cast("Callable[..., Any]", spec.overload)
    base = base_name(spec.name).removeprefix("aten::")
    for holder in (torch._C._VariableFunctions, torch._C._nn, torch.Tensor):
        if callable(binding := getattr(holder, base, None)):
            return cast("Callable[..., Any]", binding)
    return cast("Callable[..., Any]", spec.overload)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _on_entry(active: Active) -> None:
    """Put what a policy lists in front before the region's first op."""
    _put_in_front(expand_rules(active.policy.ops))


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell a listener of the listed ops that run in this thread, until the block ends; blocks may overlap."""
    _put_in_front(_all_known())
    _thread.listeners = [*_thread.listeners, listener]
    _include(FRONT_KEY, True)
    with hear_of_entries(_on_entry):
        try:
            yield
        finally:
            _thread.listeners = [one for one in _thread.listeners if one is not listener]
            _include(FRONT_KEY, bool(_thread.listeners))


def _all_known() -> set[str]:
    """Name what computes, what a table lists, what repairs look after, and what policies in force list."""
    found = _computing() | tables.repairs()
    for device in tables.devices():
        found |= tables.device_table(device).keys() | tables.own_kernels(device)
        if device != "reference":
            found |= expand_rules(slot_for(device).current().policy.ops).keys()
    return found
