"""Regions inside of a graph: how `torch.compile` traces the entry and the exit of a region.

Dynamo follows a region's ``__enter__`` and ``__exit__`` into the functions here. What a region changes is worked out once,
while the code is traced, and is then a row of calls of PyTorch's own functions that Dynamo writes into the graph. The policy
is in it as a token (`mezzo.torch.tokens`), and mezzo's kernels read that when the graph is traced or run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from mezzo.errors import RegionError
from mezzo.torch.eager import runs_eagerly
from mezzo.torch.policies import region_default
from mezzo.torch.switch import include
from mezzo.torch.tokens import IN_GRAPH, active_on, changes, compiler, read, refusal_of, scope_with

if TYPE_CHECKING:
    from mezzo.torch.autocast import autocast

__all__ = ["InGraph", "enter_in_graph", "leave_in_graph"]

F = TypeVar("F", bound=Callable[..., Any])

States = tuple[tuple[str, bool, torch.dtype], ...]
"""Device type, enabled flag and dtype."""

Entry = tuple[States, States, bool, bool]
"""The states that an entry sets, those it finds, the cache flag that it sets and the one it finds."""


_EXPORTED: list[list[Any]] = []
"""The entries that an export under way has recorded and that are not left yet."""

_LEFT_OPEN = (
    "autocast.__enter__() is called in a function that torch.compile(fullgraph=True) compiles, and __exit__() is not called "
    "in it. Call both in it. If it is a hook of the compiled module itself, compile a module around that one, or without "
    "fullgraph=True."
)


def _known_while_traced(function: F) -> F:
    # As torch.compiler.assume_constant_result does, which imports Dynamo: it is called, and its result is a constant.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class InGraph:
    """An entry of a region in code that Dynamo traces; made there, for Dynamo takes no other object in a ``with``."""

    def __init__(self, region: Any) -> None:
        self._region = region

    def __enter__(self) -> None:
        """Enter the region."""
        if not hasattr(self._region, "parts"):
            _break_graph()
        asked = getattr(self._region, "_asked", None)  # of a decorator in the code that is traced
        _enter(self._region, _entry(self._region) if asked is None else _entry_of(*asked))

    def __exit__(self, *exc_info: object) -> Literal[False]:
        """Leave it."""
        leave_in_graph(self._region)
        return False


def enter_in_graph(region: Any) -> None:
    """Enter a region in code that Dynamo traces.

    Args:
        region: The region. What it was made from is in ``_asked`` if it was made in traced code too.
    """
    if not _may_be_entered(region):
        _break_graph()
    _enter(region, _entry(region) if region._asked is None else _entry_of(*region._asked))


def _enter(region: Any, entry: Entry) -> None:
    to_set, found, cache_enabled, cache_found = entry
    _set(to_set, cache_enabled)
    torch.autocast_increment_nesting()
    region._traced.append((found, cache_found))


def leave_in_graph(region: Any) -> None:
    """Leave a region in code that Dynamo traces."""
    found, cache_found = region._traced.pop()
    if torch.compiler.is_exporting():
        _show_exit_to_export()
    if torch.autocast_decrement_nesting() == 0:
        torch._C.clear_autocast_cache()
    _set(found, cache_found)


@_known_while_traced
def _show_exit_to_export() -> None:
    from torch._dynamo.symbolic_convert import InstructionTranslator  # noqa: PLC0415 - it is Dynamo that asks

    output = InstructionTranslator.current_tx().output
    for node in reversed(_EXPORTED.pop()):
        output.create_node("call_function", _exit_autocast, (node,), {})


def _show_entry_to_export(region: autocast) -> None:
    """Write a region into the graph as torch.export knows it, which is without its policy."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # noqa: PLC0415 - it is Dynamo that asks

    output = InstructionTranslator.current_tx().output
    nodes = []
    for one in region.parts():
        one.check_export()
        arguments = (one.device, one.fast_dtype, one._enabled, one._cache_enabled)
        nodes.append(output.create_node("call_function", _enter_autocast, arguments, {}))
    _EXPORTED.append(nodes)


def _set(states: States, cache_enabled: bool) -> None:
    for device, enabled, dtype in states:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(cache_enabled)


@_known_while_traced
def _entry_of(*asked: Any) -> Entry:
    from mezzo.torch.autocast import autocast  # noqa: PLC0415 - it imports this module

    *arguments, policy = asked
    return _entry(autocast(*arguments, policy=policy))


@_known_while_traced
def _entry(region: autocast) -> Entry:
    """Work out what an entry sets and finds."""
    if torch.compiler.is_exporting():
        _show_entry_to_export(region)
    IN_GRAPH[:] = ["a region was entered in a graph"]
    for function in (torch.set_autocast_enabled, torch.set_autocast_dtype, torch.set_autocast_cache_enabled):
        torch.fx.node.has_side_effect(function)  # or a pass over the graph takes them for calls that do nothing
    include()
    before = scope = read()
    to_set: list[tuple[str, bool, torch.dtype]] = []
    for one in region.parts():
        device = one.device.split(":", 1)[0]
        scope = scope_with(scope, device, one._active or active_on(device) or region_default(one._slot))
        to_set.append((device, one._enabled, one.fast_dtype))
    if refusal := refusal_of(scope):
        raise RegionError(refusal)
    compiler.mark_disk_cache(unheard=True)
    to_set += changes(before, scope)
    include()  # the region's token may be one that puts the key on
    found = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device, *_ in to_set]
    _put_back_after_tracing(found)
    return tuple(to_set), tuple(found), region._cache_enabled, torch.is_autocast_cache_enabled()


def _put_back_after_tracing(found: list[tuple[str, bool, torch.dtype]]) -> None:
    """See to it that tracing ends, or stops where the graph breaks, in the state in which it began.

    Dynamo sets the state while it traces, and afterwards undoes what it set, the last first. It undoes no dtypes. And a
    region of PyTorch's that is left is not in the row any more, so what a region of mezzo's found in it would stay.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator  # noqa: PLC0415 - it is Dynamo that asks

    output = InstructionTranslator.current_tx().output
    at_first = list(output.tracing_context.global_context.global_state.values())

    def put_dtypes_back() -> None:
        for device, _, dtype in found:
            torch.set_autocast_dtype(device, dtype)

    def put_first_state_back() -> None:
        for function, value in at_first:
            function(value)

    output.add_cleanup_hook(put_dtypes_back)
    output.cleanup_hooks.insert(0, put_first_state_back)  # the first of the row is called last


@_known_while_traced
def _may_be_entered(region: object) -> bool:
    """Say whether a region may be entered inside of the graph: by a ``with``, or in code compiled with ``fullgraph=True``.

    Dynamo does not break a graph inside of a ``with``. A region that is entered by a call of ``__enter__``, by a hook for
    instance, could be open where it does, and no graph may end with another state than it began.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator  # noqa: PLC0415 - it is Dynamo that asks

    tracer = InstructionTranslator.current_tx()
    caller: Any = tracer
    while caller is not None:
        if any(manager.cm_obj is region for manager in caller.active_generic_context_managers):
            return True
        caller = getattr(caller, "parent", None)
    if tracer.one_graph:
        tracer.output.add_graph_finalizer(_check_that_all_are_left)
    return bool(tracer.one_graph)


def _check_that_all_are_left(module: torch.fx.GraphModule) -> None:
    called = [node.target for node in module.graph.nodes if node.op == "call_function"]
    if called.count(torch.autocast_increment_nesting) != called.count(torch.autocast_decrement_nesting):
        raise RegionError(_LEFT_OPEN)


@runs_eagerly
def _break_graph() -> None:
    """Make Dynamo stop here, and run the region's entry itself."""
