"""Sums of a report by module, by op and by dtype."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.report import OpRecord, Report, Totals
from mezzo.report.modules import ModuleTotals, module_tree
from mezzo.report.numbers import Loss, Numbers
from mezzo.report.ops import ran_in, totals_by_dtype, totals_by_op
from mezzo.report.tree import tree_rows
from mezzo.report.worst import worst

from .module_reports import large, module_report
from .reports import few, records, reports

paths = st.sampled_from([(), ("head",), ("layers.0",), ("layers.0.mlp",), ("layers.1.mlp",), ("(Linear)",)])


def placed(some: list[OpRecord], where: list[tuple[str, ...]]) -> list[OpRecord]:
    """Put records into modules."""
    return [OpRecord(**{**vars(one), "path": path}) for one, path in zip(some, where, strict=False)]


def in_any_order(totals: Totals) -> dict[str, object]:
    """Give the totals without the order of what is equally frequent: that of the tree is not that of time."""
    return {**vars(totals), "dots": frozenset(totals.dots)}


def names(tree: ModuleTotals) -> list[str]:
    return [module.name for _, module in tree.walk()]


# Modules


@few
@given(st.lists(records(), min_size=6, max_size=6), st.lists(paths, max_size=6))
def test_a_module_adds_up_what_is_in_it_and_in_the_modules_inside(
    some: list[OpRecord], where: list[tuple[str, ...]]
) -> None:
    some = placed(some, where)
    tree = module_tree(some)
    assert in_any_order(tree.totals) == in_any_order(Totals.of(some))
    for _, module in tree.walk():
        inside = [one for one in some if module.name == "" or f"{''.join(one.path)}.".startswith(f"{module.name}.")]
        assert in_any_order(module.totals) == in_any_order(Totals.of(inside))
        assert module.own == Totals.of(one for one in some if "".join(one.path) == module.name)


def test_modules_stand_in_the_order_of_their_first_op() -> None:
    order = ("b.2", "a", "b.1", "b.2.c", "a.x")
    assert names(module_tree([OpRecord("add", "fp32", path=(name,)) for name in order])) == [
        "", "b", "b.2", "b.2.c", "b.1", "a", "a.x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("separator", "path", "found"),
    [
        (".", ("layers.0.mlp",), ["layers", "layers.0", "layers.0.mlp"]),
        (".", ("(Linear.v2)",), ["(Linear.v2)"]),
        (".", ("",), []),
        (".", (), []),
        ("/", ("jit f", "x.y"), ["jit f", "jit f/x.y"]),
    ],
)
def test_a_path_becomes_the_names_of_modules(separator: str, path: tuple[str, ...], found: list[str]) -> None:
    assert names(module_tree([OpRecord("add", "fp32", path=path)], separator=separator)) == ["", *found]


def test_a_module_is_found_by_its_name_and_a_wrong_name_is_answered_with_the_right_ones() -> None:
    tree = module_report(2).modules
    assert tree["layers.1.attn"].own.ops == 4
    with pytest.raises(KeyError, match=r"No op ran in a module of the name 'layer'. Directly inside '' are: 'layers'"):
        tree["layer"]
    with pytest.raises(KeyError, match=r"Directly inside 'layers.1.attn.qkv' are: none"):
        tree["layers.1.attn.qkv"]["q"]


def test_the_numbers_of_a_module_are_those_of_all_ops_inside_with_gradients_apart() -> None:
    gradients = Numbers(10, 0.5, 1e-8, losses={"float16": Loss(underflow=0.5)})
    tree = module_report(2, large(), gradients).modules
    assert {phase: one.elements for phase, one in tree["layers.0.attn"].numbers.items()} == {
        "forward": 4 * 128, "backward": 2 * 10,
    }  # fmt: skip
    assert {phase: one.elements for phase, one in tree.numbers.items()} == {"forward": 10 * 128, "backward": 4 * 10}
    assert tree.numbers["backward"].losses["float16"].underflow == 0.5
    assert tree["layers.0.norm"].numbers["forward"].max_abs == 70000
    assert not module_report(1).modules.numbers


# Totals


def test_results_are_bytes_by_dtype_without_what_is_only_handed_on() -> None:
    shape = {"gave": ("float16", "int64"), "shapes_out": ((4,), ("batch", 2))}
    totals = Totals.of([OpRecord("sort", "fp32", **shape), OpRecord("jit", "fp32", encloses=True, **shape)])
    assert totals.results == {"int64": 16, "float16": 8}
    assert (totals.bytes_given, totals.low_share) == (24, 1.0)


@pytest.mark.parametrize(
    ("gave", "share"),
    [
        ((), None),
        (("int64",), None),
        (("complex64",), None),
        (("float32",), 0.0),
        (("bfloat16", "float32"), 0.5),
        (("float8_e5m2", "float16", "float64", "float32"), 0.5),
    ],
)
def test_the_low_share_counts_elements_and_not_bytes(gave: tuple[str, ...], share: float | None) -> None:
    one = OpRecord("op", "fp32", gave=gave, shapes_out=((10,),) * len(gave))
    assert Totals.of([one]).low_share == share


def test_empty_results_have_no_low_share() -> None:
    assert Totals.of([OpRecord("op", "fp32", gave=("float16",), shapes_out=((0,),))]).low_share is None


@few
@given(st.lists(records(), max_size=6), st.lists(records(), max_size=6))
def test_totals_can_be_added(first: list[OpRecord], second: list[OpRecord]) -> None:
    one, both = Totals.of(first) + Totals.of(second), Totals.of(first + second)
    assert one == both
    assert one.bytes_given == sum(record.bytes_written for record in first + second if not record.encloses)
    assert [*one.phases] == [*both.phases]


# Ops and dtypes


@few
@given(reports())
def test_the_ops_add_up_to_the_whole(report: Report) -> None:
    ops = report.by_op
    assert {one.op: one.totals.ops for one in ops} == Counter(record.op for record in report.records)
    assert [one.totals.ops for one in ops] == sorted((one.totals.ops for one in ops), reverse=True)
    assert sum(one.totals.casts for one in ops) == report.totals.casts
    dtypes: Counter[str] = Counter()
    for one in report.by_dtype.values():
        dtypes[one.dtype] = sum(one.listed.values()) + sum(one.others.values())
    known = [ran_in(record) for record in report.records if not record.encloses]
    assert dtypes == Counter(dtype for dtype in known if dtype)


def test_an_op_says_where_and_in_what_it_ran() -> None:
    ops = {one.op: one for one in module_report(3, large()).by_op}
    assert dict(ops["aten::linear"].dtypes) == {"bfloat16": 3}
    assert ops["aten::linear"].modules == 3
    assert ops["aten::linear"].totals.casts == 6
    assert ops["aten::softmax"].numbers["forward"].elements == 3 * 128


def test_listed_ops_stand_apart_from_those_without_a_rule() -> None:
    by_dtype = module_report(2).by_dtype
    assert dict(by_dtype["bfloat16"].listed) == {"aten::linear": 2}
    assert dict(by_dtype["bfloat16"].others) == {"aten::mul": 2, "aten::relu": 2, "aten::mm": 2}
    assert dict(by_dtype["float32"].listed) == {"aten::layer_norm": 2, "aten::softmax": 2}
    assert by_dtype["bfloat16"].bytes_given == 8 * 8 * 16 * 2


@pytest.mark.parametrize(
    ("used", "gave", "dtype"),
    [
        (("float32", "int64", "float32"), ("bool",), "float32"),
        (("float32", "bfloat16"), ("float32",), "bfloat16 + float32"),
        ((), ("float16",), "float16"),
        (("int64",), ("int64",), ""),
        (("complex64",), ("float32",), "complex64"),
    ],
)
def test_an_op_runs_in_the_dtypes_of_its_operands(used: tuple[str, ...], gave: tuple[str, ...], dtype: str) -> None:
    one = OpRecord(
        "op", "x", came=used, used=used, gave=gave, shapes_in=((),) * len(used), shapes_out=((),) * len(gave)
    )
    assert ran_in(one) == dtype
    assert [*totals_by_dtype([one])] == ([dtype] if dtype else [])
    assert totals_by_op([one])[0].dtypes == ({dtype: 1} if dtype else {})


# Rows of the tree


def test_layers_that_are_alike_are_one_row_and_levels_that_do_not_fit_are_left_out() -> None:
    tree = module_report(12).modules
    rows, left = tree_rows(tree)
    assert [(row.depth, row.text, row.alike) for row in rows] == [
        (0, "(whole)", 1),
        (1, "layers", 1),
        (2, "0 .. 11, each", 12),
        (3, "norm", 1),
        (3, "attn", 1),
        (4, "qkv", 1),
    ]
    assert left == 0
    assert [row.depth for row in tree_rows(tree, rows=5)[0]] == [0, 1, 2, 3, 3]
    assert tree_rows(tree, rows=1)[1] == 3
    assert len(tree_rows(tree, rows=1)[0]) == 2


def test_a_layer_that_differs_has_a_row_of_its_own() -> None:
    records = list(module_report(4).records)
    records[10] = OpRecord("other", "fp32", path=("layers.2",))
    labels = [row.text for row in tree_rows(module_tree(records))[0] if row.depth == 2]
    assert labels == ["0 .. 1, each", "2", "3"]


def test_modules_with_nothing_but_one_module_inside_share_its_row() -> None:
    tree = module_tree([OpRecord("add", "fp32", path=(path,)) for path in ("a.b.c.1", "a.b.c.2", "d")])
    assert [row.label for row in tree_rows(tree)[0]] == ["(whole)", "a.b.c", "1 .. 2", "d"]


# The worst


def test_the_worst_ops_are_found_among_all_and_the_first_of_equals_is_named() -> None:
    def op(name: str, numbers: Numbers | None) -> OpRecord:
        return OpRecord(name, "fp32", numbers=numbers)

    mild, bad = Loss(overflow=0.1, underflow=0.9), Loss(overflow=0.5)
    found = worst(
        [
            op("none", None),
            op("fine", Numbers(4, 1.0, 0.5)),
            op("mild", Numbers(4, 1.0, 0.5, losses={"float16": mild}, error=0.25)),
            op("bad", Numbers(4, 1.0, 0.5, losses={"float16": bad}, error=float("nan"))),
            op("twin", Numbers(4, 1.0, 0.5, inf=1, losses={"float16": bad})),
            op("last", Numbers(4, 1.0, 0.5, nan=3, inf=1, losses={"bfloat16": Loss(overflow=1.0)})),
        ]
    )
    assert {what: (how, record.op) for what, (how, record) in found.items()} == {
        "not finite": ("first, 1 Inf", "twin"),
        "overflow": ("50% in float16", "bad"),
        "underflow": ("90% in float16", "mild"),
        "error": ("0.25", "mild"),
    }
    only = worst([op("last", Numbers(4, 1.0, 0.5, losses={"bfloat16": Loss(overflow=1.0)}))])
    assert only["overflow"][0] == "100% in bfloat16"
    assert worst([op("fine", Numbers(4, 1.0, 0.5))]) == {}


# Filters and copies


def test_a_module_as_a_filter_takes_what_is_inside_with_its_findings() -> None:
    report = module_report(12)
    part = report.where(module="layers.1")
    assert {record.path for record in part.records} == {
        ("layers.1.norm",), ("layers.1.attn",), ("layers.1.attn.qkv",),
    }  # fmt: skip
    assert part.warnings == ()
    assert report.where(module="layers.0").warnings == report.warnings
    assert report.where(module="layers.0.norm").warnings == ()


def test_a_phase_is_a_filter() -> None:
    report = module_report(2)
    forward, backward = (report.where(phase=phase) for phase in ("forward", "backward"))
    assert {record.phase for record in backward.records} == {"backward"}
    assert len(forward.records) + len(backward.records) == len(report.records)


@pytest.mark.parametrize("again", [lambda report: pickle.loads(pickle.dumps(report)), copy.deepcopy, copy.copy])
def test_a_report_can_be_copied_and_sent_to_another_process(again: object) -> None:
    report = module_report(2, large())
    twin = again(report)  # type: ignore[operator]
    assert twin == report
    with pytest.raises(TypeError, match="does not support item assignment"):
        twin.regions[0].settings["dtype"] = "float16"
