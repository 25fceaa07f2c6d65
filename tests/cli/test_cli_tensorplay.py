"""``mezzo ops --framework tensorplay``: the tables of its two devices, one op explained, and wrong calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from mezzo import builtin_policy
from mezzo.cli.ops_view import SHORT
from mezzo.cli.reference import reference
from mezzo.tables import device_table, read, unified
from mezzo.vocabulary import vocabulary
from tests.cli.test_cli import call, complaint, printed, rows, run_without

TABLES = {device: device_table(device, "tensorplay") for device in ("cpu", "cuda")}


def test_the_table_has_every_listed_op_on_both_devices() -> None:
    text = printed("ops", "--framework", "tensorplay")
    shown = rows(text)
    listed = {op for table in TABLES.values() for op in table}
    assert {op: shown[op] for op in listed} == {
        op: [SHORT.get(table.get(op), "-") for table in TABLES.values()] for op in listed
    }
    words = " ".join(text.split())
    assert f"default: {len(listed)} ops" in words
    assert "lower: lower_precision_fp. Other ops: run in the dtypes that come in." in words
    assert "`mezzo ops NAME --framework tensorplay` explains one." in words


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_table_of_one_device(device: str) -> None:
    shown = rows(printed("ops", "-f", "tensorplay", "-d", device))
    assert {op: shown[op] for op in TABLES[device]} == {op: [str(rule)] for op, rule in TABLES[device].items()}


@pytest.mark.parametrize("policy", ["unified", "fp32"])
def test_a_policy_for_every_device_has_one_column(policy: str) -> None:
    text = printed("ops", "-f", "tensorplay", "-p", policy)
    rules = builtin_policy(policy, framework="tensorplay").ops
    assert "every device" in text
    shown = rows(text)
    assert {op: shown[op] for op in rules} == {op: [str(rule)] for op, rule in rules.items()}


@pytest.mark.parametrize("arguments", [(), ("-d", "cuda"), ("-p", "unified")])
def test_at_80_columns_no_rule_is_cut_short(arguments: tuple[str, ...]) -> None:
    result = call("ops", "-f", "tensorplay", *arguments, COLUMNS="80")
    assert result.exit_code == 0
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("spelling", ["softmax", "F.softmax", "tensorplay.softmax", "Tensor.softmax", "nn.Softmax"])
def test_an_op_is_found_in_each_spelling_and_explained_on_each_device(spelling: str) -> None:
    assert printed("ops", spelling, "-f", "tensorplay").splitlines() == [
        f"{spelling} under the policy 'default'",
        "",
        "on cpu",
        "softmax: not listed",
        "  from the default of 'default' for ops it does not list",
        "  runs in the dtypes that come in",
        "",
        "on cuda",
        "softmax: fp32",
        "  from the table of the device",
        (
            "  every eligible input is cast to float32 "
            "(bfloat16 -> float32, float16 -> float32; float32, float64, int64 as they come)"
        ),
        "  cast by mezzo",
    ]


def test_devices_that_agree_share_one_block() -> None:
    text = printed("ops", "mm", "-f", "tensorplay")
    assert text.count("on cpu, cuda\nmm: lower_precision_fp\n") == text.count("cast by mezzo") == 1
    assert "PyTorch" not in text


def test_a_composition_is_shown_by_its_parts() -> None:
    text = printed("ops", "nn.LSTMCell", "-f", "tensorplay", "-d", "cuda")
    assert "\non cuda\nno op of its own; it is composed of\nlinear: lower_precision_fp\n" in text
    text = printed("ops", "F.cross_entropy", "-f", "tensorplay", "-d", "cuda")
    assert "\non cuda\ncross_entropy_loss: fp32\n" in text
    assert "\nthe function of this name is composed of\nlog_softmax: fp32\n" in text


def test_a_policy_file_for_tensorplay(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('framework = "tensorplay"\nbase = "default"\n[ops]\ntanh = "fp32"\n', encoding="utf-8")
    assert "tanh: fp32\n  from the policy 'mine'" in printed("ops", "tanh", "-f", "tensorplay", "-p", str(path))
    assert rows(printed("ops", "-f", "tensorplay", "-p", str(path)))["tanh"] == ["fp32", "fp32"]
    text = "mezzo: policy 'mine' is for 'tensorplay', and this is the adapter for 'torch'"
    assert complaint("ops", "tanh", "-f", "torch", "-p", str(path)).startswith(text)
    assert printed("ops", "tanh", "-p", str(path)) == printed("ops", "tanh", "-f", "tensorplay", "-p", str(path))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("sofmax",), "mezzo: 'sofmax' is no op of TensorPlay. Did you mean 'softmax'"),
        (("aten::mm",), "mezzo: 'aten::mm' is no op that a policy for TensorPlay names"),
        (
            ("sum.dim_IntList",),
            "mezzo: 'sum.dim_IntList' is no op of TensorPlay, whose ops are named without overloads.",
        ),
        (
            ("exp", "-d", "xpu"),
            "mezzo: no built-in table for device 'xpu': TensorPlay has autocast on the CPU and on CUDA",
        ),
        (("-d", "gpu"), "mezzo: no built-in table for device 'gpu': there is no such table. Allowed are cpu, cuda."),
        (("-p", "torch"), "mezzo: 'torch' is for PyTorch's ops, and 'tensorplay' has no policy of that name"),
        (
            ("-p", "unifed"),
            "mezzo: 'unifed' is no built-in policy; allowed are default, tensorplay, unified, fp32, cpu",
        ),
    ],
)
def test_a_wrong_call_is_one_clear_line(arguments: tuple[str, ...], text: str) -> None:
    assert complaint("ops", *arguments, "-f", "tensorplay").startswith(text)


def test_the_tables_of_tensorplay_need_no_framework() -> None:
    done = run_without({"torch", "numpy", "jax", "tensorplay"}, "ops", "mm", "-f", "tensorplay")
    assert done.returncode == 0, done.stderr
    assert "mm: lower_precision_fp" in done.stdout


# The op reference


def test_the_op_reference_has_every_op_alias_and_repair() -> None:
    _, _, section = reference().partition("## Ops of TensorPlay\n")
    ops, _, names = section.partition("## Names of TensorPlay's functions\n")
    cells = {row[0].strip("`"): row[1:] for row in (line.strip("| ").split(" | ") for line in ops.splitlines())}
    for device, place in (("cpu", 0), ("cuda", 1)):
        for row in read("tensorplay", device):
            assert cells[row["op"]][place].endswith("`*`") == (row["origin"] != "native")
    assert {op for op in unified("tensorplay") if cells[op][2] == "-"} == set()
    for row in read("tensorplay", "repairs"):
        assert cells[row["op"]][3].startswith(row["repair"])
        assert cells[row["op"]][3].count("no ") == len(row["lacks"].split())
    for name in vocabulary("tensorplay").aliases:
        assert f"\n| `{name}` | " in names
