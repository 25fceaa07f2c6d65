"""Policies for TensorPlay: its tables, its built-in policies, what an override may say, explanations and files."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from mezzo import (
    ByDtype,
    CastPolicy,
    DeviceError,
    Policy,
    PolicyError,
    PolicyFileError,
    UnknownOpError,
    UnknownPolicyError,
    builtin_policy,
)
from mezzo.builtin import builtin_names, resolve_policy
from mezzo.tables import (
    device_table,
    devices,
    differing,
    frameworks,
    lacking,
    own_kernels,
    promoted_first,
    read,
    repair_kinds,
    repairs,
    unified,
)
from mezzo.vocabulary import vocabulary

FALLTHROUGH, PROMOTE, BANNED = CastPolicy.FALLTHROUGH, CastPolicy.PROMOTE, CastPolicy.BANNED
FP32, LOWER, PROMOTE = CastPolicy.FP32, CastPolicy.LOWER_PRECISION_FP, CastPolicy.PROMOTE
NAMES = ("default", "tensorplay", "unified", "fp32", "cpu", "cuda")
LOW = ("bfloat16", "float16")
TRAITS = vocabulary("tensorplay").traits


def builtin(name: str = "default") -> Policy:
    return builtin_policy(name, framework="tensorplay")


def mine(rules: dict[str, str], **options: object) -> Policy:
    return Policy("mine", rules, framework="tensorplay", **options)  # type: ignore[arg-type]


# The tables


def test_tensorplay_has_tables_for_its_two_devices() -> None:
    assert "tensorplay" in frameworks()
    assert devices("tensorplay") == ("cpu", "cuda")


@pytest.mark.parametrize("device", ["mtia", "maia", "xpu", "hpu", "mps", "xla"])
def test_a_device_without_autocast_is_told_so(device: str) -> None:
    text = f"'{device}': TensorPlay has autocast on the CPU and on CUDA only. Allowed are cpu, cuda.$"
    with pytest.raises(DeviceError, match=text):
        builtin().on(device)


@pytest.mark.parametrize(("device", "meant"), [("gpu", "cuda"), ("CPU", "cpu"), ("cuba", "cuda"), ("rocm", "cuda")])
def test_a_misspelled_device_is_told_the_near_one(device: str, meant: str) -> None:
    with pytest.raises(DeviceError, match=rf"there is no such table. Allowed are cpu, cuda. Did you mean '{meant}'"):
        builtin().on(device)


@pytest.mark.parametrize("file", ["cpu", "cuda", "unified", "repairs"])
def test_each_op_of_a_file_exists_and_stands_once(file: str) -> None:
    ops = [row["op"] for row in read("tensorplay", file)]
    assert len(ops) == len(set(ops))
    assert [op for op in ops if op not in TRAITS] == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_row_of_a_device_says_where_its_rule_comes_from(device: str) -> None:
    assert {row["origin"] for row in read("tensorplay", device)} == {"native", "inside", "documented"}


@pytest.mark.parametrize("name", ["unified", "fp32", "cpu", "cuda"])
def test_each_rule_of_a_table_fits_its_op(name: str) -> None:
    policy = builtin(name)
    assert Policy("again", dict(policy.ops), framework="tensorplay", repairs=policy.repairs) == policy


def test_no_rule_differs_by_dtype_and_no_kernel_is_a_devices_own() -> None:
    for device in devices("tensorplay"):
        assert differing(device, "tensorplay") == {}
        assert own_kernels(device, "tensorplay") == frozenset()


def test_the_repairs_are_of_known_kinds() -> None:
    assert set(repair_kinds("tensorplay").values()) == {"promote", "promote first", "destination"}
    assert promoted_first("tensorplay") <= set(repair_kinds("tensorplay")) <= repairs("tensorplay")
    assert set(lacking("tensorplay")) <= repairs("tensorplay")
    assert {low for lows in lacking("tensorplay").values() for low in lows} <= set(LOW)
    assert all(lacking("tensorplay").values())
    for op, kind in repair_kinds("tensorplay").items():
        assert (kind == "destination") == ("mutates" in vocabulary("tensorplay").traits[op]), op


def test_layer_norm_is_promoted_before_it_computes_wrongly() -> None:
    assert {"layer_norm", "native_layer_norm"} <= promoted_first("tensorplay")


def test_pooling_lacks_the_lower_precision_dtypes() -> None:
    assert lacking("tensorplay")["max_pool2d"] == set(LOW)
    assert "mm" not in lacking("tensorplay")


def test_the_other_frameworks_keep_their_repairs() -> None:
    assert lacking("jax") == repair_kinds("jax") == unified("jax") == unified("torch") == {}
    rows = list(read("torch", "repairs"))
    assert repairs() == {row["op"] for row in rows}
    assert promoted_first() == {row["op"] for row in rows if row["repair"] == "promote first"} != frozenset()
    assert lacking() == {row["op"]: set(row["lacks"].split()) for row in rows if row["lacks"]}


# The built-in policies


def test_the_names_of_the_builtin_policies() -> None:
    assert builtin_names("tensorplay") == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_builtin_policy_is_one_object_for_tensorplay(name: str) -> None:
    assert builtin(name) is builtin(name)
    assert resolve_policy(name, framework="tensorplay") is builtin(name)
    assert builtin(name).framework == "tensorplay"


@pytest.mark.parametrize(("name", "mended"), [("default", True), ("tensorplay", False)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_default_and_tensorplay_leave_all_to_the_device(name: str, mended: bool, device: str) -> None:
    policy = builtin(name)
    assert (dict(policy.ops), policy.default, policy.repairs) == ({}, "device", mended)
    assert policy.on(device).ops == device_table(device, "tensorplay")
    assert policy.on(device).repairs is mended
    assert policy.on(device).default is FALLTHROUGH


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_devices_policy_is_its_table_without_repairs(device: str) -> None:
    policy = builtin(device)
    assert policy.name == f"tensorplay/{device}"
    assert policy.ops == device_table(device, "tensorplay")
    assert (policy.default, policy.repairs) == (FALLTHROUGH, False)


def test_unified_is_one_table_for_all_devices() -> None:
    policy = builtin("unified")
    assert policy.ops == unified("tensorplay")
    assert policy.on("cpu") is policy.on("cuda") is policy
    assert policy.repairs


def test_unified_has_every_public_op_of_both_devices() -> None:
    """What it does not list are parts of ops, under names that PyTorch's table does not have."""
    listed = {op for device in devices("tensorplay") for op in device_table(device, "tensorplay")}
    assert listed - set(unified("tensorplay")) == {
        "_euclidean_dist",
        "_foreach_mm",
        "_weight_norm",
        "linalg_matrix_exp",
        "linalg_polar",
        "nll_loss_forward",
        "slow_conv3d",
        "slow_conv_transpose2d",
        "thnn_conv2d",
    }


def test_fp32_is_for_every_listed_op() -> None:
    listed = {*device_table("cpu", "tensorplay"), *device_table("cuda", "tensorplay"), *unified("tensorplay")}
    assert builtin("fp32").ops == dict.fromkeys(listed, FP32)
    assert builtin("fp32").rule("binary_cross_entropy") is FP32, "safe in float32, so not banned"


@pytest.mark.parametrize(
    ("op", "cpu", "cuda"),
    [
        ("mm", LOWER, LOWER),
        ("__matmul__", LOWER, LOWER),
        ("nn.Conv2d", LOWER, LOWER),
        ("softmax", FALLTHROUGH, FP32),
        ("exp", FALLTHROUGH, FP32),
        ("layer_norm", FALLTHROUGH, FP32),
        ("mse_loss", FP32, FP32),
        ("cat", PROMOTE, FALLTHROUGH),
        ("stack", PROMOTE, FALLTHROUGH),
        ("addcmul", FALLTHROUGH, PROMOTE),
        ("binary_cross_entropy", FP32, BANNED),
        ("relu", FALLTHROUGH, FALLTHROUGH),
        ("add_", FALLTHROUGH, FALLTHROUGH),
    ],
)
def test_an_op_of_each_kind(op: str, cpu: CastPolicy, cuda: CastPolicy) -> None:
    for low in LOW:
        assert (builtin().on("cpu").rule(op, low), builtin().on("cuda").rule(op, low)) == (cpu, cuda)


@pytest.mark.parametrize("name", ["torch", "apex-o1"])
def test_a_policy_of_pytorchs_is_told_apart_from_a_misspelled_one(name: str) -> None:
    text = (
        f"'{name}' is for PyTorch's ops, and 'tensorplay' has no policy of that name; ask for framework='torch', or for"
    )
    with pytest.raises(UnknownPolicyError, match=text):
        builtin(name)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_tensorplays_policy_is_not_for_the_others(framework: str) -> None:
    text = f"'tensorplay' is for TensorPlay's ops, and '{framework}' has no policy .* framework='tensorplay', or for"
    with pytest.raises(UnknownPolicyError, match=text):
        builtin_policy("tensorplay", framework=framework)


def test_an_unknown_policy_is_told_what_there_is() -> None:
    with pytest.raises(
        UnknownPolicyError, match=f"'unfied' is no built-in policy; allowed are {', '.join(NAMES)}. Did"
    ):
        builtin("unfied")


def test_a_policy_for_another_framework_is_refused() -> None:
    with pytest.raises(PolicyError, match="policy 'default' is for 'torch', and this is the adapter for 'tensorplay'"):
        resolve_policy(builtin_policy("default"), framework="tensorplay")
    with pytest.raises(PolicyError, match="policy 'default' is for 'tensorplay', and this is the adapter for 'jax'"):
        resolve_policy(builtin(), framework="jax")
    text = r"To change single rules: builtin_policy\('default', framework='tensorplay'\).override\(\{'softmax': 'fp32'"
    with pytest.raises(PolicyError, match=text):
        resolve_policy({"softmax": "fp32"}, framework="tensorplay")  # type: ignore[arg-type]


# Rules and defaults


def test_an_override_takes_spellings_and_both_dtypes() -> None:
    policy = builtin().override({"F.softmax": "fp32", "nn.Linear": {"bfloat16": "fallthrough", "float16": "fp32"}})
    assert policy.on("cpu").rule("softmax") is FP32
    assert policy.ops["linear"] == ByDtype(FALLTHROUGH, FP32)
    assert policy.diff(builtin()) == {"softmax": (FP32, None), "linear": (ByDtype(FALLTHROUGH, FP32), None)}
    assert policy.on("cpu").rule("mm") is LOWER


def test_an_ops_name_covers_what_the_function_of_that_name_enters() -> None:
    assert dict(mine({"kl_div": "fp32"}).ops) == {"kl_div": FP32, "tp_kl_div": FP32}
    assert dict(mine({"F.kl_div": "fp32"}).ops) == {"tp_kl_div": FP32}
    assert dict(mine({"_C.kl_div": "fp32"}).ops) == {"kl_div": FP32}
    assert dict(mine({"F.bilinear": "fp32"}).ops) == {"bilinear": FP32}


@pytest.mark.parametrize("names", [["kl_div", "tp_kl_div"], ["tp_kl_div", "kl_div"]])
def test_an_op_that_is_named_itself_has_its_own_rule(names: list[str]) -> None:
    rules = {"kl_div": "fp32", "tp_kl_div": "promote"}
    assert dict(mine({name: rules[name] for name in names}).ops) == {"kl_div": FP32, "tp_kl_div": PROMOTE}


@pytest.mark.parametrize(
    "rules", [{"_C.kl_div": "fp32"}, {"kl_div": "fp32"}, {"kl_div": "fp32", "tp_kl_div": "promote"}]
)
def test_a_file_keeps_which_of_them_has_a_rule(rules: dict[str, str], tmp_path: Path) -> None:
    mine(rules).save(tmp_path / "mine.toml")
    assert Policy.load(tmp_path / "mine.toml") == mine(rules)


@pytest.mark.parametrize(
    "rule", ["lower_precision_fp", "fp32", "promote", "banned", "banned_lower_precision", "fallthrough"]
)
def test_the_rules_that_an_op_takes(rule: str) -> None:
    assert mine({"mm": rule}).rule("mm") == rule


@pytest.mark.parametrize("rule", ["banned", "banned_lower_precision", "fallthrough"])
def test_the_rules_that_an_op_takes_that_writes_in_place(rule: str) -> None:
    assert mine({"add_": rule}).rule("add_") == rule


@pytest.mark.parametrize(
    ("op", "rule", "text"),
    [
        ("softmax", "fp32_set_opt_dtype", "softmax: fp32_set_opt_dtype is a rule for PyTorch, .* use fp32"),
        ("norm", "fp32_append_dtype", "norm: fp32_append_dtype is a rule for PyTorch, .* use fp32"),
        ("mm", "opaque", "mm: opaque is a rule for JAX; use fallthrough"),
        ("add_", "fp32", "add_ writes into an argument, .* banned, banned_lower_precision and fallthrough"),
        ("__iadd__", "promote", "add_ writes into an argument"),
        ("index_put_", "lower_precision_fp", "index_put_ writes into an argument"),
        ("LSTMCell", "fp32", "it is composed of linear, add, sigmoid, tanh, mul. Name those"),
        ("sum.dim_IntList", "fp32", "named without overloads. Did you mean 'sum'"),
        ("mm", "float32", "'float32' is not a cast policy"),
    ],
)
def test_a_rule_that_an_op_cannot_take(op: str, rule: str, text: str) -> None:
    with pytest.raises((PolicyError, UnknownOpError), match=text):
        builtin().override({op: rule})
    with pytest.raises((PolicyError, UnknownOpError), match=text):
        builtin().override({op: {"bfloat16": "banned", "float16": rule}})


@pytest.mark.parametrize("given", ["fp32", "promote", "lower_precision_fp"])
def test_a_default_covers_the_ops_that_compute(given: str) -> None:
    policy = mine({"mm": "fallthrough"}, default=given)
    for op in ("relu", "add", "sum", "tp_kl_div", "erfcx"):
        assert policy.rule_of(op, "bfloat16") == given, op
    for op in ("mm", "add_", "view", "reshape", "zeros", "nobodys_op"):
        assert policy.rule_of(op, "bfloat16") is FALLTHROUGH, op


def test_the_defaults_if_nothing_is_said() -> None:
    assert (mine({}).default, mine({}).repairs) == (FALLTHROUGH, True)
    assert mine({}, default="device").on("cuda").rule("exp") is FP32
    assert mine({}, repairs=False).repairs is False


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: mine({}, default="opaque"), "opaque cannot be a policy's default; .* lower_precision_fp and device"),
        (lambda: mine({}, default="banned"), "allowed are fallthrough, promote, fp32, lower_precision_fp and device.$"),
        (lambda: mine({}, repairs="no"), "repairs must be True or False, got 'no'"),
    ],
)
def test_what_a_policy_cannot_have(make: Callable[[], Policy], text: str) -> None:
    with pytest.raises(PolicyError, match=text):
        make()


# A policy as a value


@pytest.mark.parametrize("policy", [builtin(name) for name in NAMES], ids=NAMES)
def test_builtin_policies_survive_pickle_and_files(policy: Policy, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    policy.save(path)
    for copied in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy), Policy.load(path)):
        assert copied == policy
        assert (copied.framework, copied.default, copied.repairs) == ("tensorplay", policy.default, policy.repairs)


def test_every_op_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    policy = mine(dict.fromkeys(TRAITS, "fallthrough"))
    policy.save(path)
    assert Policy.load(path) == policy


def test_a_file_for_tensorplay(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'framework = "tensorplay"\nbase = "cuda"\nrepairs = true\n[ops]\n"F.softmax" = "fallthrough"\n'
        'exp = { bfloat16 = "fallthrough", float16 = "fp32" }\n',
        encoding="utf-8",
    )
    policy = resolve_policy(path, framework="tensorplay")
    assert (policy.name, policy.repairs) == ("mine", True)
    assert policy.rule("softmax") is FALLTHROUGH
    assert policy.rule("exp", "float16") is FP32
    assert policy.rule("mm") is LOWER


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("base = 'torch'", PolicyFileError, "base: 'torch' is for PyTorch's ops"),
        ("base = 'xpu'", PolicyFileError, "base: 'xpu' is no built-in policy; allowed are default, tensorplay"),
        ("default = 'opaque'", PolicyFileError, "opaque cannot be a policy's default"),
        ("[ops]\nsofmax = 'fp32'", UnknownOpError, "'sofmax' is no op of TensorPlay. Did you mean 'softmax'"),
        ("[ops]\nadd_ = 'fp32'", PolicyFileError, "add_ writes into an argument"),
    ],
)
def test_a_faulty_file_is_one_clear_error(text: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"framework = 'tensorplay'\n{text}\n", encoding="utf-8")
    with pytest.raises(error) as caught:
        Policy.load(path)
    assert str(caught.value).startswith(f"{path}: {message}")
