"""Records and reports for the tests of the report: drawn at random, and one with few arguments."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from mezzo.report import Finding, OpRecord, Region, Report, Residuals, SourceLine

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int32": 4, "bool": 1, "complex64": 8, "uint4": 0.5}


@st.composite
def records(draw: st.DrawFn) -> OpRecord:
    dtypes = st.sampled_from(sorted(SIZES))
    shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    operands = draw(st.lists(st.tuples(dtypes, dtypes, shapes), max_size=3))
    results = draw(st.lists(st.tuples(dtypes, shapes), max_size=2))
    return OpRecord(
        op=draw(st.sampled_from(["add", "dot_general", "exp"])),
        rule=draw(st.sampled_from(["fp32", "promote", "lower_precision_fp"])),
        reason=draw(st.sampled_from(["", "disabled()", "precision=HIGHEST"])),
        path=draw(st.sampled_from([(), ("scan",), ("jit f", "scan")])),
        source=draw(st.sampled_from([None, SourceLine("/a/b/net.py", 3, "loss"), SourceLine("net.py", 4)])),
        came=tuple(came for came, _, _ in operands),
        used=tuple(used for _, used, _ in operands),
        gave=tuple(gave for gave, _ in results),
        shapes_in=tuple(shape for _, _, shape in operands),
        shapes_out=tuple(shape for _, shape in results),
        dot=draw(st.booleans()),
        encloses=draw(st.booleans()),
        times=draw(st.sampled_from([1, 4, None])),
    )


@st.composite
def reports(draw: st.DrawFn) -> Report:
    names = st.sampled_from(["loss", "other"])
    found = st.sampled_from(
        [Finding("kind", "message " * 20, "advice " * 30, SourceLine("net.py", 4)), Finding("a", "b")]
    )
    regions = st.builds(
        Region,
        names,
        st.just({"dtype": "bfloat16", "policy": "default"}),
        st.lists(records(), max_size=4).map(tuple),
        st.lists(found, max_size=2).map(tuple),
        st.sampled_from([None, Residuals(10, 5), Residuals(None, None, "no reason")]),
    )
    return Report("step", "jax", tuple(draw(st.lists(regions, max_size=2))), ("a note",))


few = settings(max_examples=25)
"""Reports take long to make, so there are few."""


def record(op: str, came: str, used: str, gave: str, **more: Any) -> OpRecord:
    operands = {"came": (came,), "used": (used,), "gave": (gave,), "shapes_in": ((1024,),), "shapes_out": ((1024,),)}
    return OpRecord(op, "promote", **{**operands, **more})
