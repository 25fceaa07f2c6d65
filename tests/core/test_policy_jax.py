"""Policies for JAX: one table, its built-in policies, what an override may say, and files."""

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
from mezzo.tables import device_table, devices, differing, frameworks, own_kernels, promoted_first, read, repairs
from mezzo.vocabulary import vocabulary

FALLTHROUGH, OPAQUE, PROMOTE = CastPolicy.FALLTHROUGH, CastPolicy.OPAQUE, CastPolicy.PROMOTE
FP32, LOWER = CastPolicy.FP32, CastPolicy.LOWER_PRECISION_FP


def default() -> Policy:
    return builtin_policy("default", framework="jax")


def mine(rules: dict[str, str], **options: str) -> Policy:
    return Policy("mine", rules, framework="jax", **options)  # type: ignore[arg-type]


# The table


def test_jax_has_one_table_for_all_devices() -> None:
    assert "jax" in frameworks()
    assert devices("jax") == ("xla",)
    with pytest.raises(DeviceError, match=r"'cuda': its tables are for whatever XLA compiles .* Allowed are xla\."):
        default().on("cuda")


def test_pytorch_lists_xla_as_a_device_whose_table_is_elsewhere() -> None:
    with pytest.raises(DeviceError, match="'xla': its table ships with torch_xla"):
        builtin_policy("default").on("xla")


def test_each_primitive_has_traits_and_a_rule_and_stands_once_in_each_file() -> None:
    listed = [row["op"] for row in read("jax", "ops")]
    ruled = [row["op"] for row in read("jax", "xla")]
    assert listed == ruled == sorted(set(listed))


def test_no_trait_is_misspelled() -> None:
    known = {"compute", "dot", "moves", "follows", "independent", "enters", "fixed"}
    assert {trait for row in read("jax", "ops") for trait in row["traits"].split()} == known


def test_each_rule_of_the_table_fits_its_primitive() -> None:
    rules = default().ops
    assert Policy("again", dict(rules), framework="jax").ops == rules


def test_the_two_rules_that_differ_by_dtype() -> None:
    assert dict(differing("xla", "jax")) == {"erfc": FP32, "integer_pow": FP32}
    assert differing("cuda") == {}
    assert default().ops["erfc"] == ByDtype(FALLTHROUGH, FP32)
    assert default().rule("integer_pow", "float16") is FP32
    assert default().rule("integer_pow") is FALLTHROUGH


def test_the_traits_that_go_with_a_rule() -> None:
    table = device_table("xla", "jax")
    traits = vocabulary.__wrapped__("jax").traits
    for op, rule in table.items():
        assert (rule is LOWER) == ("dot" in traits[op]), op
        if rule is FP32:
            assert "compute" in traits[op], op
        if rule is OPAQUE:
            assert "compute" not in traits[op], op
        if "fixed" in traits[op]:
            assert rule is OPAQUE, op
        if "moves" in traits[op] or "follows" in traits[op]:
            assert rule is FALLTHROUGH, op


def test_jax_has_nothing_to_repair_and_no_kernels_of_a_device() -> None:
    assert repairs("jax") == promoted_first("jax") == own_kernels("xla", "jax") == frozenset()


# The built-in policies


def test_the_names_of_the_builtin_policies() -> None:
    assert builtin_names("jax") == ("default", "unified", "fp32", "xla")


@pytest.mark.parametrize("name", ["default", "unified", "xla"])
def test_the_builtin_policies_are_the_table(name: str) -> None:
    policy = builtin_policy(name, framework="jax")
    assert policy is builtin_policy(name, framework="jax")
    assert policy == default()
    assert (policy.default, policy.repairs, policy.framework) == (OPAQUE, False, "jax")
    assert policy.on("xla") is policy


@pytest.mark.parametrize(
    ("op", "rule"),
    [
        ("dot_general", LOWER),
        ("conv_general_dilated", LOWER),
        ("exp", FP32),
        ("reduce_sum", FP32),
        ("scatter-add", FP32),
        ("add_any", FP32),
        ("sin", FP32),
        ("cholesky", FP32),
        ("fft", FP32),
        ("add", PROMOTE),
        ("select_n", PROMOTE),
        ("concatenate", PROMOTE),
        ("tanh", FALLTHROUGH),
        ("logistic", FALLTHROUGH),
        ("reduce_max", FALLTHROUGH),
        ("psum", FALLTHROUGH),
        ("reshape", FALLTHROUGH),
        ("dynamic_update_slice", FALLTHROUGH),
        ("convert_element_type", FALLTHROUGH),
        ("jit", FALLTHROUGH),
        ("scan", FALLTHROUGH),
        ("while", OPAQUE),
        ("custom_vjp_call", OPAQUE),
        ("pallas_call", OPAQUE),
        ("reduce_precision", OPAQUE),
        ("bitcast_convert_type", OPAQUE),
        ("random_bits", FALLTHROUGH),
    ],
)
def test_a_primitive_of_each_kind(op: str, rule: CastPolicy) -> None:
    assert default().rule(op) is default().rule(op, "float16") is rule


def test_fp32_is_for_what_computes_and_leaves_structure_alone() -> None:
    policy, traits = builtin_policy("fp32", framework="jax"), vocabulary.__wrapped__("jax").traits
    for op, known in traits.items():
        assert policy.ops[op] == (FP32 if "compute" in known else default().ops[op]), op
    assert policy.rule("dot_general") is policy.rule("add") is policy.rule("tanh") is FP32
    assert policy.rule("scan") is policy.rule("reshape") is FALLTHROUGH
    assert policy.default == OPAQUE


@pytest.mark.parametrize("name", ["torch", "apex-o1"])
def test_a_policy_of_pytorchs_is_told_apart_from_a_misspelled_one(name: str) -> None:
    with pytest.raises(
        UnknownPolicyError, match=f"'{name}' is for PyTorch's ops, .* for one of default, unified, fp32, xla"
    ):
        builtin_policy(name, framework="jax")
    with pytest.raises(UnknownPolicyError, match=f"'{name}' is for PyTorch's ops"):
        resolve_policy(name, framework="jax")


@pytest.mark.parametrize("name", ["cuda", "defalt"])
def test_an_unknown_policy_is_told_what_there_is(name: str) -> None:
    with pytest.raises(UnknownPolicyError, match="is no built-in policy; allowed are default, unified, fp32, xla"):
        builtin_policy(name, framework="jax")


def test_a_policy_for_the_other_framework_is_refused() -> None:
    with pytest.raises(PolicyError, match="policy 'default' is for 'torch', and this is the adapter for 'jax'"):
        resolve_policy(builtin_policy("default"), framework="jax")
    with pytest.raises(PolicyError, match="policy 'default' is for 'jax', and this is the adapter for 'torch'"):
        resolve_policy(default())


# Rules and defaults


def test_an_override_takes_names_of_functions_and_both_dtypes() -> None:
    assert default().override({"jnp.einsum": "fp32"}).rule("dot_general") is FP32
    split = default().override({"exp": {"bfloat16": "fallthrough", "float16": "fp32"}})
    assert (split.rule("lax.exp"), split.rule("lax.exp", "float16")) == (FALLTHROUGH, FP32)
    assert split.diff(default()) == {"exp": (ByDtype(FALLTHROUGH, FP32), FP32)}


@pytest.mark.parametrize(
    ("op", "rule", "text"),
    [
        ("exp", "fp32_set_opt_dtype", "exp: fp32_set_opt_dtype is a rule for PyTorch, .* use fp32"),
        ("norm", "fp32_append_dtype", "'norm' is no primitive of JAX: it is traced as mul, reduce_sum, sqrt"),
        ("reduce_sum", "fp32_append_dtype", "reduce_sum: fp32_append_dtype is a rule for PyTorch, .* use fp32"),
        ("scan", "fp32", "scan runs other primitives, .* allowed are fallthrough, opaque, banned"),
        ("jit", "promote", "jit runs other primitives"),
        ("while", "lower_precision_fp", "while runs other primitives"),
        ("custom_vjp", "banned_lower_precision", "custom_vjp_call runs other primitives"),
        ("astype", "fp32", "convert_element_type is a cast that the function itself asks for"),
        ("pallas_call", "fp32", "pallas_call holds the dtypes with which it was traced, .* opaque and banned"),
        ("pure_callback", "fallthrough", "pure_callback holds the dtypes"),
    ],
)
def test_a_rule_that_a_primitive_cannot_take(op: str, rule: str, text: str) -> None:
    with pytest.raises((PolicyError, UnknownOpError), match=text):
        default().override({op: rule})
    with pytest.raises((PolicyError, UnknownOpError), match=text):
        default().override({op: {"bfloat16": "banned", "float16": rule}})


@pytest.mark.parametrize("op", ["scan", "while", "custom_vjp_call", "remat2", "convert_element_type"])
@pytest.mark.parametrize("rule", ["fallthrough", "opaque", "banned"])
def test_what_runs_other_primitives_is_entered_left_alone_or_banned(op: str, rule: str) -> None:
    assert default().override({op: rule}).rule(op) == rule


@pytest.mark.parametrize("rule", ["opaque", "banned", "banned_lower_precision", "promote", "lower_precision_fp"])
def test_a_primitive_that_computes_takes_each_rule_of_jaxs(rule: str) -> None:
    assert default().override({"exp": rule}).rule("exp") == rule


def test_opaque_stays_a_rule_for_jax_only() -> None:
    with pytest.raises(PolicyError, match="opaque is a rule for JAX; use fallthrough"):
        Policy("p", {"mm": "opaque"})
    with pytest.raises(PolicyError, match="opaque cannot be a policy's default; allowed are fallthrough"):
        Policy("p", default="opaque")


@pytest.mark.parametrize("given", ["opaque", "fp32", "promote", "lower_precision_fp", "fallthrough"])
def test_a_default_covers_the_primitives_that_compute(given: str) -> None:
    policy = mine({"dot_general": "fp32"}, default=given)
    assert policy.rule("exp") == policy.rule("add") == policy.rule("conv_general_dilated") == given
    assert policy.rule("dot_general") is FP32


@pytest.mark.parametrize("given", ["opaque", "fp32", "lower_precision_fp"])
def test_a_default_leaves_structure_as_in_the_table(given: str) -> None:
    policy = mine({}, default=given)
    for op in ("reshape", "scan", "jit", "while", "concatenate", "dynamic_update_slice", "pallas_call", "random_bits"):
        assert policy.rule(op) == default().rule(op), op


def test_a_primitive_that_nobody_knows_is_opaque_whatever_the_default() -> None:
    for policy in (default(), mine({}, default="fp32")):
        assert policy.rule_of("somebodys_kernel", "bfloat16") is OPAQUE


def test_the_defaults_if_nothing_is_said() -> None:
    assert (mine({}).default, mine({}).repairs) == (OPAQUE, False)
    assert (Policy("p").default, Policy("p").repairs) == (FALLTHROUGH, True)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: mine({}, default="device"),
            r"the default 'device' is for PyTorch, .* builtin_policy\('default', fram",
        ),
        (lambda: mine({}, default="banned"), "allowed are opaque, fallthrough, promote, fp32, lower_precision_fp.$"),
        (lambda: Policy("p", framework="jax", repairs=True), "repairs mend calls that PyTorch's autocast lets down"),
        (lambda: Policy("p", framework="jax", repairs="no"), "repairs must be True or False, got 'no'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_pytorchs_alone_is_refused(make: Callable[[], Policy], text: str) -> None:
    with pytest.raises(PolicyError, match=text):
        make()


# A policy as a value


@pytest.mark.parametrize("policy", [default(), mine({"exp": "fp32"}), default().override({"sum": "fallthrough"})])
def test_policies_survive_pickle_and_files(policy: Policy, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    policy.save(path)
    for copied in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy), Policy.load(path)):
        assert copied == policy
        assert (copied.framework, copied.default, copied.repairs) == ("jax", policy.default, False)


def test_a_file_for_jax(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'framework = "jax"\nbase = "default"\n[ops]\n"jnp.sum" = "fallthrough"\nscatter-add = "promote"\n'
        'integer_pow = "fp32"\nexp = { bfloat16 = "fallthrough", float16 = "fp32" }\n',
        encoding="utf-8",
    )
    policy = resolve_policy(path, framework="jax")
    assert policy.name == "mine"
    assert policy == default().override(
        {
            "reduce_sum": "fallthrough",
            "scatter-add": "promote",
            "integer_pow": "fp32",
            "exp": {"bfloat16": "fallthrough", "float16": "fp32"},
        }
    )


def test_a_file_without_a_base_has_jaxs_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('framework = "jax"\n[ops]\ndot = "lower_precision_fp"\n', encoding="utf-8")
    assert Policy.load(path) == mine({"dot_general": "lower_precision_fp"})


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("base = 'torch'", PolicyFileError, "base: 'torch' is for PyTorch's ops"),
        ("default = 'device'", PolicyFileError, "the default 'device' is for PyTorch"),
        ("repairs = true", PolicyFileError, "repairs mend calls that PyTorch's"),
        ("[ops]\nsoftmax = 'fp32'", UnknownOpError, "'softmax' is no primitive of JAX"),
        ("[ops]\nscan = 'fp32'", PolicyFileError, "scan runs other primitives"),
    ],
)
def test_a_faulty_file_is_one_clear_error(text: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"framework = 'jax'\n{text}\n", encoding="utf-8")
    with pytest.raises(error) as caught:
        Policy.load(path)
    assert str(caught.value).startswith(f"{path}: {message}")
