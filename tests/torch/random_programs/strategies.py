"""How programs are drawn: small first, so that a counterexample shrinks to what is needed for it."""

from __future__ import annotations

from hypothesis import strategies as st

from . import program as p
from .changing import CHANGES
from .operations import OPERATIONS

__all__ = ["NATIVE_POLICIES", "POLICIES", "programs"]

Draw = st.DrawFn

_REGISTERS = "abcdi"
# Integers are seldom what an op takes; a whole number of registers of each dtype sets how often each comes.
_READ = st.sampled_from("aaabbccdWUi")
_WRITTEN = st.sampled_from("aabbccddi")
_RULES = ("lower_precision_fp", "fp32", "promote", "fallthrough", "banned")


@st.composite
def _override(draw: Draw) -> tuple[str, object]:
    # Ops that write can only be banned, and then what calls them inside is banned too, which only PyTorch knows.
    operation = draw(st.sampled_from([operation for operation in OPERATIONS.values() if not operation.writes]))
    rules = (*_RULES, "fp32_set_opt_dtype") if operation.takes_dtype else _RULES
    return operation.canonical, draw(st.sampled_from(rules))


_BUILTIN = st.sampled_from(["default", "unified", "torch", "fp32"]).map(p.PolicyChoice)
_OVERRIDES = st.lists(_override(), min_size=1, max_size=4, unique_by=lambda rule: rule[0]).map(tuple)
_DERIVED = st.builds(p.PolicyChoice, st.sampled_from(["default", "unified", "torch", "fp32"]), _OVERRIDES)
_EVERYTHING = st.builds(
    p.PolicyChoice,
    st.just("everything"),
    st.one_of(st.just(()), _OVERRIDES),
    st.sampled_from(["device", "fp32", "lower_precision_fp", "promote"]),
)
POLICIES = st.one_of(_BUILTIN, _BUILTIN, _DERIVED, _EVERYTHING)
NATIVE_POLICIES = st.sampled_from(["default", "torch"]).map(p.PolicyChoice)
"""Those under which PyTorch's own kernels do the casting."""


@st.composite
def _calls(draw: Draw) -> p.Call:
    operation = OPERATIONS[draw(st.sampled_from(list(OPERATIONS)))]
    target = draw(_WRITTEN)
    args: list[str | None] = []
    for slot in operation.slots:
        if slot == "register":
            args.append(target)
        elif slot == "matrix":
            name = draw(_READ)
            # What is written into is not read by the same op; that PyTorch does not define.
            args.append("abcd"["abcd".find(name) - 1] if operation.writes and name == target else name)
        elif slot.endswith("?"):
            args.append(draw(st.sampled_from([slot[0], None])))
        elif slot == "W":
            args.append(draw(st.sampled_from("WWUab")))
        else:
            args.append(slot)
    return p.Call(operation.name, tuple(args), target)


# How often each kind of statement is drawn.
_LEAF = ("call",) * 5 + ("layer",) * 4 + ("update",) * 2 + ("backward",) * 2 + ("clear",)
_NESTED = ("region",) * 5 + ("grad",) * 2 + ("thread", "try", "keep", "generator")


def _layers() -> st.SearchStrategy[p.Call]:
    """Draw calls that weights take part in, so that there are gradients."""
    source, target = st.sampled_from("aaab"), st.sampled_from("aaaabbcd")
    return st.one_of(
        st.builds(lambda x, y: p.Call("linear", (x, "W", None), y), source, target),
        st.builds(lambda x, y, w: p.Call("matmul", (x, w), y), source, target, st.sampled_from("WWU")),
        st.builds(lambda x, y: p.Call("conv1d", (x, "K"), y), source, target),
        st.builds(lambda x, y: p.Call("layer_norm", (x, "N", "B"), y), source, target),
    )


def _leaf(kind: str) -> st.SearchStrategy[p.Statement]:
    if kind == "call":
        return _calls()
    if kind == "layer":
        return _layers()
    if kind == "update":
        return st.builds(p.Update, st.sampled_from(CHANGES), st.sampled_from("WWWUBKN"))
    if kind == "backward":
        return st.builds(p.Backward, st.sampled_from("aaaabcd"))
    return st.just(p.ClearCache())


def _regions(
    policies: st.SearchStrategy[p.PolicyChoice], body: st.SearchStrategy[p.Block]
) -> st.SearchStrategy[p.Region]:
    shared = {
        "body": body,
        "how": st.sampled_from(["with", "with", "with", "decorated", "recursive"]),
        "dtype": st.sampled_from([None, "bfloat16", "float16"]),
        "enabled": st.sampled_from([True, True, True, True, False]),
        "cache_enabled": st.sampled_from([None, None, None, False, True]),
    }
    named = st.builds(p.Region, kind=st.just("mezzo"), policy=st.one_of(st.none(), policies), **shared)
    # PyTorch's own lose the state before the outermost call of a function that calls itself.
    shared["how"] = st.sampled_from(["with", "decorated"])
    return st.one_of(named, named, st.builds(p.Region, kind=st.just("torch"), **shared))


def _blocks(policies: st.SearchStrategy[p.PolicyChoice], depth: int) -> st.SearchStrategy[p.Block]:
    leaves = st.sampled_from(_LEAF).flatmap(_leaf)
    if depth == 0:
        return st.lists(leaves, min_size=1, max_size=6).map(tuple)
    inner = _blocks(policies, depth - 1)
    nested = st.sampled_from(_NESTED).flatmap(lambda kind: _compound(kind, policies, inner))
    return st.lists(st.one_of(leaves, nested), min_size=1, max_size=6).map(tuple)


def _compound(
    kind: str, policies: st.SearchStrategy[p.PolicyChoice], inner: st.SearchStrategy[p.Block]
) -> st.SearchStrategy[p.Statement]:
    if kind == "region":
        return _regions(policies, inner)
    if kind == "grad":
        return st.builds(p.Grad, st.sampled_from(["no_grad", "inference_mode", "enable_grad"]), inner)
    if kind == "thread":
        return st.builds(p.Thread, inner, st.booleans())
    if kind == "try":
        return st.builds(lambda body, ends: p.Try((*body, p.Raise()) if ends else body), inner, st.booleans())
    if kind == "keep":
        return st.builds(p.KeepCasts, inner)
    empty = _regions(policies, st.just(()))
    decorators = empty.filter(lambda region: region.kind == "mezzo")
    steps = st.lists(inner, min_size=1, max_size=2).map(tuple)
    return st.builds(p.Generator, decorators, steps, inner, st.one_of(st.none(), empty))


def programs(policies: st.SearchStrategy[p.PolicyChoice], *, default: bool = True) -> st.SearchStrategy[p.Program]:
    """Draw programs, most of which start with a region.

    Args:
        policies: The policies that regions are given.
        default: Whether some programs set the process-wide default policy.
    """
    block = _blocks(policies, 2)
    start = _blocks(policies, 0)
    first = st.builds(lambda before, region, after: (*before, region, *after), start, _regions(policies, block), start)
    ends = st.builds(lambda body: (*body, p.Raise()), first)
    defaults = st.one_of(st.none(), st.none(), policies) if default else st.none()
    return st.builds(p.Program, st.one_of(first, first, ends, block), defaults)
