"""Policies as TOML files: round trips, bases, and one clear error for each fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo import CastPolicy, Policy, PolicyFileError, UnknownOpError, builtin_policy
from mezzo.builtin import resolve_policy

from .test_policy import exact, tables


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


@settings(max_examples=50)
@given(tables, st.sampled_from(["fallthrough", "promote", "fp32", "device"]))
def test_save_and_load_give_an_equal_policy(
    tmp_path_factory: pytest.TempPathFactory, table: dict, default: str
) -> None:
    path = tmp_path_factory.mktemp("policies") / "p.toml"
    policy = Policy('odd "name" \\ ü', exact(table), default=default)
    policy.save(path)
    loaded = Policy.load(path)
    assert loaded == policy
    assert loaded.name == policy.name


@pytest.mark.parametrize("name", ["torch", "unified", "fp32", "apex-o1", "cpu", "cuda", "mps", "reference"])
def test_every_built_in_policy_can_be_saved(name: str, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    builtin_policy(name).save(path)
    assert Policy.load(path) == builtin_policy(name)


def test_overloads_with_one_rule_are_saved_under_one_name(tmp_path: Path) -> None:
    Policy("p", {"sum": "fp32", "conv2d.padding": "fp32"}).save(tmp_path / "p.toml")
    text = (tmp_path / "p.toml").read_text()
    assert '"aten::sum" = "fp32"' in text
    assert '"aten::conv2d.padding" = "fp32"' in text


def test_a_file_may_start_from_a_base(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        name = "careful"
        base = "unified"
        [ops]
        softmax = "fp32"
        layer_norm = { bfloat16 = "fallthrough", float16 = "fp32" }
        mylib.op = "fp32"
        """.replace("mylib.op", '"mylib::op"'),
    )
    policy = Policy.load(path)
    assert policy.name == "careful"
    assert policy.rule("softmax") is CastPolicy.FP32
    assert policy.rule("layer_norm", "bfloat16") is CastPolicy.FALLTHROUGH
    assert policy.rule("linear") is CastPolicy.LOWER_PRECISION_FP
    assert "mylib::op" in policy.ops
    assert policy.origin("aten::linear") == "the policy 'unified'"


def test_the_base_torch_keeps_the_devices_own_rules(tmp_path: Path) -> None:
    policy = Policy.load(write(tmp_path, 'base = "torch"\n[ops]\nsoftmax = "fp32"'))
    assert policy.default == "device"
    assert policy.on("cpu").rule("conv2d") is CastPolicy.LOWER_PRECISION_FP


def test_a_file_without_a_name_is_named_after_itself(tmp_path: Path) -> None:
    assert Policy.load(write(tmp_path, "")).name == "mine"


def test_policy_arguments_may_be_paths(tmp_path: Path) -> None:
    path = write(tmp_path, '[ops]\nmm = "fp32"')
    assert resolve_policy(path) == resolve_policy(str(path)) == Policy("x", {"mm": "fp32"})


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "nam = 'x'",
            PolicyFileError,
            "unknown key 'nam'; allowed are name, framework, base, default, repairs, ops. Did you mean 'name'?",
        ),
        (
            "[op]\nmm = 'fp32'",
            PolicyFileError,
            "unknown key 'op'; allowed are name, framework, base, default, repairs, ops.",
        ),
        ("ops = 'fp32'", PolicyFileError, "'ops' must be a table, got 'fp32'."),
        ("name = 3", PolicyFileError, "'name' must be a string, got 3."),
        ("[ops]\nmm = 'fp16'", PolicyFileError, "rule for 'mm': 'fp16' is not a cast policy; allowed are"),
        ("[ops]\nmm = 3", PolicyFileError, "rule for 'mm': 3 is not a cast policy; allowed are"),
        (
            "[ops]\nmm = {bfloat16 = 'fp32'}",
            PolicyFileError,
            "rule for 'mm': a rule that differs by dtype must give both",
        ),
        (
            "[ops]\nmm = {bfloat16 = 'fp32', half = 'fp32'}",
            PolicyFileError,
            "rule for 'mm': 'half' is not a lower-precision",
        ),
        ("[ops]\nsofmax = 'fp32'", UnknownOpError, "'sofmax' is no op that this framework has. Did you mean 'softmax'"),
        ("base = 'unifed'", PolicyFileError, "base: 'unifed' is no built-in policy; allowed are"),
        (
            "framework = 'numpy'",
            PolicyFileError,
            "mezzo has no op tables for framework 'numpy'; allowed are torch, jax, tensorplay.",
        ),
        ("default = 'banned'", PolicyFileError, "banned cannot be a policy's default; allowed are"),
        ("[ops\n", PolicyFileError, "not a valid TOML file: "),
        ("mm = \n", PolicyFileError, "not a valid TOML file: "),
    ],
)
def test_one_clear_error_for_each_fault(text: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(error) as caught:
        Policy.load(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert caught.value.__cause__ is None


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyFileError, match="not a valid TOML file"):
        Policy.load(path)


def test_a_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        resolve_policy(str(tmp_path / "none.toml"))
