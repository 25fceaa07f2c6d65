"""The ``mezzo`` command: what it prints, and that a wrong call is one clear line and exit status 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import mezzo
from mezzo import tables
from mezzo.cli.app import app
from mezzo.cli.ops_view import SHORT

WIDE = {"COLUMNS": "250", "NO_COLOR": "1"}


def call(*arguments: str, **environment: str) -> Result:
    return CliRunner(env={**WIDE, **environment}).invoke(app, list(arguments))


def printed(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def complaint(*arguments: str) -> str:
    """Give the one line that a wrong call is answered with."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.endswith("\n")
    (line,) = result.stderr.splitlines()
    return line


def rows(text: str) -> dict[str, list[str]]:
    """Read a printed table: the first cell of each row to the others."""
    cells = [[cell.strip() for cell in line.strip("│┃ \n").split("│")] for line in text.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in cells}


# The table


def test_the_table_has_every_listed_op_on_every_device() -> None:
    shown = rows(printed("ops"))
    lists = [tables.device_table(device) for device in ("cpu", "cuda", "mps", "xpu")]
    assert "xpu, mtia, maia, reference" in printed("ops"), "devices with one list share a column"
    assert set(shown) == {op.removeprefix("aten::") for table in lists for op in table}
    for op, cells in shown.items():
        assert cells == [SHORT.get(table.get(f"aten::{op}"), "-") for table in lists]


@pytest.mark.parametrize("option", ["--device", "-d"])
def test_the_table_of_one_device(option: str) -> None:
    text = printed("ops", option, "mps")
    assert rows(text) == {op.removeprefix("aten::"): [str(rule)] for op, rule in tables.device_table("mps").items()}
    assert "mps" in text


@pytest.mark.parametrize("name", ["unified", "fp32"])
def test_a_policy_for_all_devices_has_one_column(name: str) -> None:
    text = printed("ops", "--policy", name)
    policy = mezzo.builtin_policy(name)
    assert "every device" in text
    assert rows(text) == {op.removeprefix("aten::"): [str(rule)] for op, rule in policy.ops.items()}


def test_at_80_columns_no_rule_is_cut_short_for_one_device() -> None:
    result = call("ops", "--device", "cuda", COLUMNS="80")
    assert result.exit_code == 0
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_at_80_columns_the_whole_table_can_be_read() -> None:
    result = call("ops", COLUMNS="80")
    assert result.exit_code == 0
    assert "…" not in result.stdout


# One op

SPELLINGS = (
    "softmax",
    "softmax.int",
    "F.softmax",
    "torch.softmax",
    "Tensor.softmax",
    "nn.Softmax",
    "torch.nn.functional.softmax",
    "aten::softmax",
    "aten::softmax.int",
    "torch.ops.aten.softmax.int",
)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_op_is_found_in_each_spelling(spelling: str) -> None:
    heading, *rest = printed("ops", spelling, "-d", "cuda").splitlines()
    assert heading == f"{spelling} under the policy 'default'"
    assert rest == printed("ops", "softmax", "-d", "cuda").splitlines()[1:]
    assert "aten::softmax.int: fp32_set_opt_dtype" in rest


def test_devices_that_agree_share_a_paragraph() -> None:
    lines = printed("ops", "softmax").splitlines()
    assert [line for line in lines if line.startswith("on ")] == [
        "on cpu",
        "on cuda, xpu, mtia, maia, reference",
        "on mps",
    ]


def test_a_call_that_is_not_listed_is_looked_into() -> None:
    text = printed("ops", "cross_entropy", "-d", "cuda")
    assert "aten::cross_entropy_loss: not listed" in text
    assert "and inside it\naten::log_softmax.int: fp32_set_opt_dtype" in text


@pytest.mark.parametrize(
    ("op", "policy", "who"),
    [
        ("linear", "torch", "cast by PyTorch's kernel"),
        ("linear", "unified", "cast by PyTorch's kernel"),
        ("linear", "fp32", "cast by mezzo's kernel, since the device's own rule is lower_precision_fp"),
        ("exp", "unified", "cast by mezzo's kernel, since the device's own rule is none"),
        ("relu", "unified", "cast by nobody; the ops inside it that are listed, if there are any, are cast"),
    ],
)
def test_it_says_who_casts(op: str, policy: str, who: str) -> None:
    assert printed("ops", op, "-d", "cpu", "-p", policy).splitlines()[-1].strip() == who


def test_it_says_who_casts_an_op_that_only_the_default_covers(tmp_path: Path) -> None:
    path = tmp_path / "all.toml"
    path.write_text('name = "all"\ndefault = "fp32"\n', encoding="utf-8")
    lines = printed("ops", "gelu", "-d", "cpu", "-p", str(path)).splitlines()
    assert "aten::gelu: fp32" in lines
    assert lines[-1].strip().startswith("cast by mezzo's kernel")


def test_a_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nbase = "unified"\n[ops]\nsoftmax = "fallthrough"\n', encoding="utf-8")
    assert "aten::softmax.int: fallthrough\n  from the policy 'mine'" in printed("ops", "softmax", "-p", str(path))
    assert rows(printed("ops", "-p", str(path)))["softmax.int"] == ["fallthrough"]


@pytest.mark.parametrize("option", ["--framework", "-f"])
def test_the_framework_may_be_named(option: str) -> None:
    assert printed("ops", "mm", option, "torch") == printed("ops", "mm")


# Wrong calls


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("ops", "sofmax"), "mezzo: 'sofmax' is no op that this framework has. Did you mean 'softmax', "),
        (
            ("ops", "softmax.dim"),
            "mezzo: 'softmax.dim' is no op: aten::softmax has no such overload; it has ",
        ),
        (
            ("ops", "--device", "banana"),
            "mezzo: no built-in table for device 'banana': there is no such table. Allowed ",
        ),
        (
            ("ops", "mm", "--device", "cud"),
            "mezzo: no built-in table for device 'cud': there is no such table. Allowed ",
        ),
        (
            ("ops", "--policy", "unified", "--device", "banana"),
            "mezzo: no built-in table for device 'banana': ",
        ),
        (
            ("ops", "--policy", "unifed"),
            "mezzo: 'unifed' is no built-in policy; allowed are default, torch, unified, fp32, ",
        ),
        (("ops", "--framework", "jaxx"), "mezzo: mezzo has no op tables for framework 'jaxx'; allowed are "),
    ],
)
def test_a_wrong_call_is_told_what_is_allowed(arguments: tuple[str, ...], text: str) -> None:
    assert complaint(*arguments).startswith(text)


def test_near_names_are_offered() -> None:
    assert complaint("ops", "mm", "-d", "cud").endswith("Did you mean 'cuda' or 'cpu'?")
    assert complaint("ops", "softmax", "--device", "gpu").endswith(" Did you mean 'cuda'?")
    assert complaint("ops", "-p", "unifed").endswith(
        "Did you mean 'unified'? A policy in a file is named by a path object or a string that ends in .toml."
    )


@pytest.mark.parametrize("arguments", [("ops",), ("ops", "mm")], ids=["table", "one-op"])
@pytest.mark.parametrize(("device", "who"), [("hpu", "Intel Gaudi's PyTorch plugin"), ("xla", "torch_xla")])
def test_a_table_that_others_ship_is_said_to_be_theirs(arguments: tuple[str, ...], device: str, who: str) -> None:
    assert f"its table ships with {who}" in complaint(*arguments, "--device", device)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = str(tmp_path / "none.toml")
    line = complaint("ops", "-p", path)
    assert "No such file" in line
    assert path in line


def test_a_folder_is_no_policy_file(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    assert "folder.toml" in complaint("ops", "-p", str(tmp_path / "folder.toml"))


def test_a_file_with_a_wrong_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('nme = "mine"\n', encoding="utf-8")
    assert complaint("ops", "-p", str(path)) == (
        f"mezzo: {path}: unknown key 'nme'; allowed are name, framework, base, default, repairs, ops. Did you mean 'name'?"
    )


def test_brackets_in_a_message_are_no_markup(tmp_path: Path) -> None:
    assert "'[bold]x[/bold]'" in complaint("ops", "[bold]x[/bold]")


# The rest


def test_the_version() -> None:
    assert printed("--version") == f"mezzo {mezzo.__version__}\n"


def test_python_m_mezzo_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "mezzo", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"mezzo {mezzo.__version__}\n", "")


def test_without_arguments_it_helps() -> None:
    result = call()
    assert "demo" in result.output
    assert "ops" in result.output


def test_the_demo_writes_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    result = call(
        "demo", "--quick", "--epochs", "1", "--device", "cpu", "--framework", "torch", "--output", str(folder)
    )
    assert result.exit_code == 0, result.output
    assert {path.name for path in folder.iterdir()} == {"loss.png", "results.json"}
    assert json.loads((folder / "results.json").read_text(encoding="utf-8"))["plan"]["epochs"] == 1
    assert str(folder / "loss.png") in result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("--device", "banana"),
            "mezzo: Device 'banana' is not one that PyTorch knows; expected a name like ",
        ),
        (("--device", "meta"), "mezzo: Device 'meta' has no autocast; "),
        (("--device", "cpu", "--epochs", "0"), "mezzo: "),
    ],
)
def test_a_demo_that_cannot_be_says_why_and_writes_nothing(
    arguments: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    assert complaint("demo", "--quick", "--output", str(tmp_path / "out"), *arguments).startswith(text)
    assert not (tmp_path / "out").exists()


# A finder that lets nobody find some packages, as if they were not installed.
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
sys.argv = ["mezzo", *{arguments!r}]
from mezzo.cli import main
main()
"""


def run_without(absent: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(absent=absent, arguments=arguments)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_cli_extra_it_says_what_to_install(package: str) -> None:
    done = run_without({package}, "--version")
    advice = f"the mezzo command needs {package}, which is not installed; run: pip install 'mezzo[cli]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", advice)


@pytest.mark.parametrize("package", ["torch", "sklearn", "matplotlib"])
def test_without_the_demo_extra_the_demo_says_what_to_install(package: str) -> None:
    # Without PyTorch the demo runs in JAX or TensorPlay, if one is there.
    done = run_without({package, "jax", "tensorplay"}, "demo", "--quick")
    advice = f"mezzo: the demo needs {package}, which is not installed; run: pip install 'mezzo[demo]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", advice)


def test_the_tables_need_no_framework() -> None:
    done = run_without({"torch", "numpy", "jax", "sklearn", "matplotlib"}, "ops", "mm", "--device", "cuda")
    assert done.returncode == 0, done.stderr
    assert "aten::mm: lower_precision_fp" in done.stdout
