"""``mezzo ops --framework jax``: the table of primitives, one primitive explained, and wrong calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from mezzo import builtin_policy
from mezzo.tables import read
from tests.cli.test_cli import call, complaint, printed, rows, run_without

LISTED = {row["op"] for row in read("jax", "xla")}


@pytest.mark.parametrize("policy", ["default", "unified", "fp32", "xla"])
def test_the_table_has_one_column_with_the_rule_of_each_primitive(policy: str) -> None:
    text = printed("ops", "--framework", "jax", "--policy", policy)
    rules = builtin_policy(policy, framework="jax").ops
    assert "every device" in text
    shown = rows(text)
    assert {op: shown[op] for op in LISTED} == {op: [str(rules[op])] for op in LISTED}
    assert "Other ops: opaque. `mezzo ops NAME --framework jax` explains one." in " ".join(text.split())


def test_at_80_columns_no_rule_is_cut_short() -> None:
    result = call("ops", "-f", "jax", COLUMNS="80")
    assert result.exit_code == 0
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("spelling", ["dot_general", "jnp.matmul", "lax.dot", "einsum", "jax.lax.dot_general_p"])
def test_a_primitive_is_found_in_each_spelling(spelling: str) -> None:
    assert printed("ops", spelling, "-f", "jax").splitlines() == [
        f"{spelling} under the policy 'default'",
        "",
        "dot_general: lower_precision_fp",
        "  from the policy 'default'",
        (
            "  every float operand is cast to the region's dtype, and the result has it; "
            "a call with a precision of its own is left alone"
        ),
    ]


def test_the_device_may_be_named_but_says_nothing() -> None:
    assert printed("ops", "exp", "-f", "jax", "-d", "xla") == printed("ops", "exp", "-f", "jax")
    assert "PyTorch" not in printed("ops", "exp", "-f", "jax")


def test_a_composition_is_shown_by_its_parts() -> None:
    text = printed("ops", "jax.nn.softmax", "-f", "jax")
    assert "\n\nno primitive of its own; it is traced as\nreduce_max: fallthrough\n" in text
    assert "\nexp: fp32\n" in text


def test_a_policy_file_for_jax(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('framework = "jax"\nbase = "default"\n[ops]\ntanh = "fp32"\n', encoding="utf-8")
    assert "tanh: fp32\n  from the policy 'mine'" in printed("ops", "tanh", "-f", "jax", "-p", str(path))
    assert rows(printed("ops", "-f", "jax", "-p", str(path)))["tanh"] == ["fp32"]
    assert printed("ops", "tanh", "-p", str(path)) == printed("ops", "tanh", "-f", "jax", "-p", str(path))
    text = "mezzo: policy 'mine' is for 'jax', and this is the adapter for 'torch'. One is made with framework='torch'"
    assert complaint("ops", "tanh", "-f", "torch", "-p", str(path)).startswith(text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("sofmax",), "mezzo: 'sofmax' is no primitive of JAX. Did you mean 'softmax'"),
        (("aten::mm",), "mezzo: 'aten::mm' is no primitive of JAX: names with a namespace are PyTorch's."),
        (
            ("exp", "-d", "cuda"),
            "mezzo: no built-in table for device 'cuda': its tables are for whatever XLA compiles for",
        ),
        (("-d", "cpu"), "mezzo: no built-in table for device 'cpu': its tables are for whatever XLA compiles for"),
        (("-p", "torch"), "mezzo: 'torch' is for PyTorch's ops, and 'jax' has no policy of that name"),
        (("-p", "apex-o1"), "mezzo: 'apex-o1' is for PyTorch's ops, and 'jax' has no policy of that name"),
    ],
)
def test_a_wrong_call_is_one_clear_line(arguments: tuple[str, ...], text: str) -> None:
    assert complaint("ops", *arguments, "-f", "jax").startswith(text)


def test_the_tables_of_jax_need_no_framework() -> None:
    done = run_without({"torch", "numpy", "jax"}, "ops", "jnp.exp", "-f", "jax")
    assert done.returncode == 0, done.stderr
    assert "exp: fp32" in done.stdout
