"""Tokens: how compiled code can tell one policy from another.

`torch.compile` guards the state of PyTorch's autocast, of every device type there is, and knows nothing of policies. So what
is in force in a thread is also written down in states that nothing else uses: those of device types that no build of PyTorch
can run. One combination of their flags and dtypes is a token, and stands for the policies of all devices of a thread. Code
compiled under one token is not run under another, and code that enters a region inside of a graph sets the token there.

A token always says what the slots (`mezzo.torch.active`) say, which see to it. Three device types give 26: 18 with the
switch on (`mezzo.torch.switch`), 8 without. The last of each kind is for all policies that come when the others are given
away: eager code needs no token, and `mezzo.torch.compiling` refuses to compile there.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from mezzo.torch.compiling import NO_TOKEN, Compiler, watch_compiler
from mezzo.torch.switch import DEVICE as SWITCH
from mezzo.torch.switch import include

if TYPE_CHECKING:
    from mezzo.policy import Policy
    from mezzo.torch.active import Active

__all__ = [
    "DEVICES",
    "IN_GRAPH",
    "THREAD",
    "Move",
    "Scope",
    "Step",
    "active_on",
    "changes",
    "clear",
    "compiler",
    "content_of",
    "read",
    "refusal_of",
    "scope_with",
    "step_to",
]

DEVICES = ("maia", "ipu") if importlib.util.find_spec("torch_xla") else ("maia", "ipu", "xla")
"""The device types whose states make up the tokens. With PyTorch's package for it, xla is one that can be run."""

IN_GRAPH: list[str] = []
"""Not empty once a region has been entered inside of a graph; from then on the token is asked first, for no slot knows."""

Token = tuple[tuple[str, torch.dtype], ...]
"""The device types that are on, and their dtypes."""

Move = tuple[Callable[[str, Any], None], str, Any]
"""A call that changes a token."""

_is_enabled, _dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
_LOW = (torch.bfloat16, torch.float16)
# The dtypes that stand there while nobody uses the devices; with them, a token is set by one call.
_USUAL = {device: torch.get_autocast_dtype(device) for device in DEVICES}


class Scope:
    """Which policy is in force on which device of a thread.

    Attributes:
        actives: Device type to policy; a device on which no region of mezzo's is open is not there.
        token: What says so.
        has_own: Whether the token is for this scope alone.
        is_watched: Whether the token puts the key of `mezzo.torch.switch` on.
    """

    __slots__ = ("actives", "has_own", "is_watched", "token")

    def __init__(self, actives: Mapping[str, Active], token: Token, *, has_own: bool = True) -> None:
        self.actives = actives
        self.token = token
        self.has_own = has_own
        self.is_watched = SWITCH in dict(token)


Step = tuple[Scope, tuple[Move, ...], tuple[Move, ...]]
"""The scope that a region leads to, and the calls that lead there and back."""


def _all_tokens() -> list[Token]:
    """Give every token, the cheapest to set first."""
    found = [
        tuple((device, dtype) for device, dtype in zip(DEVICES, dtypes, strict=True) if dtype is not None)
        for dtypes in product((None, *_LOW), repeat=len(DEVICES))
    ]
    return sorted(
        found[1:], key=lambda token: (len(token), sum(_USUAL[device] is not dtype for device, dtype in token))
    )


# Of the two kinds, those that put mezzo's key on (`mezzo.torch.switch`) and those that leave it off, the last is for the
# policies that come when the others are given away.
_TOKENS = {
    watched: [token for token in _all_tokens() if (SWITCH in dict(token)) is watched] for watched in (True, False)
}
_NO_TOKENS = {watched: tokens.pop() for watched, tokens in _TOKENS.items()}
_counts = {watched: len(tokens) for watched, tokens in _TOKENS.items()}
_left = {watched: list(tokens) for watched, tokens in _TOKENS.items()}
_EMPTY = Scope({}, ())
_UNKNOWN = {token: Scope({}, token, has_own=False) for token in _NO_TOKENS.values()}
_Content = frozenset[tuple[str, "Policy", bool]]
"""Device type, its policy, and whether ops are watched under it: in a plain region they are not, whatever the policy."""

_by_content: dict[_Content, Scope] = {frozenset(): _EMPTY}
_by_token: dict[Token, Scope] = {(): _EMPTY}
_lock = threading.RLock()


class _Thread(threading.local):
    """A thread's scope, as far as slots have set it.

    A graph sets a token, and autograd carries one into its threads, without the knowledge of this object.
    """

    scope = _EMPTY


THREAD = _Thread()


def read() -> Scope:
    """Read this thread's token from PyTorch's state, and give what it says."""
    token = tuple((device, _dtype_of(device)) for device in DEVICES if _is_enabled(device))
    if token in _UNKNOWN:
        return THREAD.scope if THREAD.scope.token == token else _UNKNOWN[token]
    return _by_token.get(token, _EMPTY)


def active_on(device_type: str) -> Active | None:
    """Give what this thread's token says about a device; None if it says nothing."""
    return read().actives.get(device_type)


def scope_with(scope: Scope, device_type: str, active: Active | None) -> Scope:
    """Give the scope that another policy on one device leads to.

    Args:
        scope: The scope to start from.
        device_type: The device.
        active: The policy; None for none.

    Returns:
        The scope; the same object for equal policies, as long as there are tokens.
    """
    if device_type in DEVICES:  # such a device itself has a region: the state is that one's
        return scope
    actives = {device: other for device, other in scope.actives.items() if device != device_type}
    if active is not None:
        actives[device_type] = active
    content = frozenset((device, one.policy, _is_watched(one)) for device, one in actives.items())
    with _lock:
        return _by_content.get(content) or _new(content, actives)


def _is_watched(active: Active) -> bool:
    return active.plan is not None and bool(active.plan.watched)


def _new(content: _Content, actives: Mapping[str, Active]) -> Scope:
    watch_compiler(compiler)
    watched = any(map(_is_watched, actives.values()))
    if not _left[watched]:
        return Scope(actives, _NO_TOKENS[watched], has_own=False)
    scope = Scope(actives, _left[watched].pop(0))
    _by_content[content] = _by_token[scope.token] = scope
    compiler.mark_disk_cache()
    return scope


def changes(before: Scope, after: Scope) -> list[tuple[str, bool, torch.dtype]]:
    """Say how the states change from one token to another.

    Args:
        before: The scope whose token is set.
        after: The scope whose token is to be set.

    Returns:
        Device type, enabled flag and dtype of each that differs.
    """
    old, new = dict(before.token), dict(after.token)
    return [
        (device, device in new, new.get(device, _USUAL[device]))
        for device in DEVICES
        if old.get(device) is not new.get(device)
    ]


def step_to(before: Scope, device_type: str, active: Active) -> Step:
    """Work out, and remember, what a region that puts a policy in force has to do to the token."""
    after = scope_with(before, device_type, active)
    step = (after, _moves(before, after), _moves(after, before))
    # Scopes without a token of their own come without end.
    if before.has_own:
        active.steps[before] = step
    return step


def start_over() -> None:
    """Take all tokens back; for tests, which use more policies in a process than others do.

    No region may be open in any thread, and no code that has been compiled may be run any more.
    """
    global _EMPTY  # noqa: PLW0603 - what has been remembered about the old one is never asked for again
    with _lock:
        _by_content.clear()
        _by_token.clear()
        _EMPTY = _Thread.scope = THREAD.scope = Scope({}, ())
        _by_content[frozenset()] = _by_token[()] = _EMPTY
        for watched, tokens in _TOKENS.items():
            _left[watched][:] = tokens


def clear() -> None:
    """Take the token away, whatever it is."""
    THREAD.scope = _EMPTY
    for function, device, value in _moves(read(), _EMPTY):
        function(device, value)


def _moves(before: Scope, after: Scope) -> tuple[Move, ...]:
    moves: list[Move] = []
    old = dict(before.token)
    for device, enabled, dtype in changes(before, after):
        if dtype is not old.get(device, _USUAL[device]):
            moves.append((torch.set_autocast_dtype, device, dtype))
        if enabled is not (device in old):
            if enabled and device == SWITCH:
                moves.append((include, device, enabled))
            moves.append((torch.set_autocast_enabled, device, enabled))
    return tuple(moves)


def refusal_of(scope: Scope) -> str:
    """Say why code must not be compiled in a scope; empty if it may."""
    count = _counts[SWITCH in dict(scope.token)]
    return "" if scope.has_own else NO_TOKEN.format(count=count)


def _meanings() -> list[str]:
    """Write down what each token stands for; the same text in every process where they stand for the same."""
    with _lock:
        scopes = list(_by_token.values())
    return [
        f"{scope.token} {device} {content_of(active.policy)}"
        for scope in scopes
        for device, active in sorted(scope.actives.items(), key=lambda item: item[0])
    ]


def content_of(policy: Policy) -> str:
    """Write down all that a policy does, without its name."""
    rules = ", ".join(f"{op}: {rule}" for op, rule in sorted(policy.ops.items()))
    return f"default={policy.default} repairs={policy.repairs} {rules}"


compiler = Compiler(lambda: bool(read().token), lambda: refusal_of(read()), _meanings)
"""What compilations in this process have to know."""
