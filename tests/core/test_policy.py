"""`Policy` as a value: building, overriding, comparing, explaining."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo import ByDtype, CastPolicy, Policy, PolicyError, UnknownOpError, UnknownPolicyError, builtin_policy
from mezzo.builtin import builtin_names, resolve_policy
from mezzo.tables import apex_lists, device_table, devices, own_kernels
from mezzo.vocabulary import vocabulary

FUNCTIONAL = sorted(op for op, traits in vocabulary().traits.items() if "compute" in traits)
rules = st.sampled_from(["lower_precision_fp", "fp32", "promote", "banned", "banned_lower_precision", "fallthrough"])
pairs = st.fixed_dictionaries({"bfloat16": rules, "float16": rules})
tables = st.dictionaries(st.sampled_from(FUNCTIONAL), rules | pairs, max_size=8)


def exact(table: dict[str, object]) -> dict[str, object]:
    """Spell out default overloads: a bare name would mean all overloads."""
    return {op if "." in op else f"{op}.default": rule for op, rule in table.items()}


@given(tables)
def test_a_policy_survives_pickle_copy_and_rebuilding(table: dict[str, object]) -> None:
    policy = Policy("p", exact(table))
    for other in (
        pickle.loads(pickle.dumps(policy)),
        copy.deepcopy(policy),
        copy.copy(policy),
        Policy("q", exact(table)),
    ):
        assert other == policy
        assert hash(other) == hash(policy)
    assert len(policy.ops) == len(table)


@given(tables, tables)
def test_override_wins_and_leaves_the_original_alone(one: dict[str, object], two: dict[str, object]) -> None:
    base = Policy("base", exact(one))
    before = dict(base.ops)
    changed = base.override(exact(two))
    assert dict(base.ops) == before
    assert dict(changed.ops) == {**before, **Policy("two", exact(two)).ops}
    assert set(changed.diff(base)) == {op for op in changed.ops if changed.ops[op] != before.get(op)}


def test_equality_is_by_content_not_by_name() -> None:
    one, two = Policy("a", {"mm.default": "fp32"}), Policy("b", {"aten::mm.default": "fp32"})
    assert one == two
    assert hash(one) == hash(two)
    assert one != Policy("a", {"mm.default": "promote"})
    assert one != Policy("a", {"mm.default": "fp32"}, default="fp32")
    assert one != "a"


def test_a_policy_cannot_be_changed_in_place() -> None:
    policy = builtin_policy("unified")
    with pytest.raises(TypeError):
        policy.ops["aten::mm"] = CastPolicy.FP32  # type: ignore[index]
    with pytest.raises(AttributeError):
        policy.name = "other"  # type: ignore[misc]


def test_a_name_without_an_overload_covers_all_but_out() -> None:
    ops = Policy("p", {"sum": "fp32"}).ops
    assert set(ops) == {"aten::sum", "aten::sum.dim_IntList"}


def test_later_entries_win() -> None:
    policy = Policy("p", {"sum": "fp32", "sum.dim_IntList": "fallthrough"})
    assert policy.rule("sum.default") is CastPolicy.FP32
    assert policy.rule("sum.dim_IntList") is CastPolicy.FALLTHROUGH


def test_a_rule_may_differ_by_low_dtype() -> None:
    policy = Policy("p", {"softmax": {"bfloat16": "fallthrough", "float16": "fp32"}})
    assert policy.rule("softmax", "bfloat16") is CastPolicy.FALLTHROUGH
    assert policy.rule("softmax", "float16") is CastPolicy.FP32
    assert policy.ops["aten::softmax.int"] == ByDtype(CastPolicy.FALLTHROUGH, CastPolicy.FP32)
    assert Policy("p", {"mm": {"bfloat16": "fp32", "float16": "fp32"}}) == Policy("p", {"mm": "fp32"})


def test_the_default_decides_for_ops_that_are_not_listed() -> None:
    assert Policy("p").rule("gelu") is CastPolicy.FALLTHROUGH
    assert Policy("p", default="fp32").rule("gelu") is CastPolicy.FP32
    assert Policy("p", default="fp32").rule("view") is CastPolicy.FALLTHROUGH, "a view must stay a view"
    assert Policy("p", default="fp32").rule("add_") is CastPolicy.FALLTHROUGH, "an in-place op writes into its input"


def test_device_default_asks_for_a_device() -> None:
    torch_policy = builtin_policy("torch")
    with pytest.raises(PolicyError, match=r"leaves 'softmax' to the device's own table; ask policy.on\(device\)"):
        torch_policy.rule("softmax")
    assert torch_policy.on("cuda").rule("softmax") is CastPolicy.FP32_SET_OPT_DTYPE
    assert torch_policy.on("cpu").rule("softmax") is CastPolicy.FALLTHROUGH
    kept = torch_policy.override({"softmax": "fp32"})
    assert kept.on("cpu").rule("softmax") is CastPolicy.FP32
    assert kept.on("cpu").rule("linear") is CastPolicy.LOWER_PRECISION_FP


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Policy("p", {"softmax": "half"}), "rule for 'softmax': 'half' is not a cast policy; allowed are "),
        (lambda: Policy("p", {"mm": 16}), "rule for 'mm': 16 is not a cast policy"),
        (
            lambda: Policy("p", {"mm": {"bfloat16": "fp32"}}),
            "rule for 'mm': a rule that differs by dtype must give both; 'float16' is missing.",
        ),
        (
            lambda: Policy("p", {"mm": {"bf16": "fp32", "float16": "fp32"}}),
            "rule for 'mm': 'bf16' is not a lower-precision dtype; allowed are bfloat16, float16.",
        ),
        (
            lambda: Policy("p", {"addmm_": "fp32"}),
            (
                "aten::addmm_ writes into an argument, so its inputs cannot be cast; allowed are banned, "
                "banned_lower_precision and fallthrough."
            ),
        ),
        (lambda: Policy("p", {"mm.out": "promote"}), "aten::mm.out writes into an argument"),
        (
            lambda: Policy("p", {"mm.default": "fp32_set_opt_dtype"}),
            "aten::mm has no optional dtype argument for fp32_set_opt_dtype to set; use fp32.",
        ),
        (
            lambda: Policy("p", {"sum": "fp32_append_dtype"}),
            "aten::sum has no overload with a dtype for fp32_append_dtype to call; use fp32.",
        ),
        (lambda: Policy("p", {"mm": "opaque"}), "aten::mm: opaque is a rule for JAX; use fallthrough."),
        (lambda: Policy(""), "a policy's name comes first and must be a non-empty string, got ''."),
        (lambda: Policy("p", ["mm"]), "a policy's ops must be a mapping from op name to rule, got list."),
        (lambda: Policy("p", {1: "fp32"}), "op names are strings, got 1."),
        (
            lambda: Policy("p", default="banned"),
            "banned cannot be a policy's default; allowed are fallthrough, promote",
        ),
        (lambda: Policy("p").override("mm"), "override() takes a mapping from op name to rule, got str."),
        (lambda: Policy("p").rule("mm.default", "float32"), "'float32' is not a lower-precision dtype; allowed are"),
        (lambda: Policy("p", framework="tensorflow"), "mezzo has no op tables for framework 'tensorflow'"),
        (lambda: resolve_policy(3), "policy must be a Policy, a built-in name or the path of a .toml file, got int."),
        (
            lambda: resolve_policy({"mm": "fp32"}),
            "policy must be a Policy, a built-in name or the path of a .toml file, got",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(build: object, text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        build()  # type: ignore[operator]
    assert str(caught.value).startswith(text)


def test_an_unknown_op_is_refused_with_near_names() -> None:
    with pytest.raises(
        UnknownOpError, match=r"'layernorm' is no op that this framework has. Did you mean 'layer_norm'"
    ):
        Policy("p", {"layernorm": "fp32"})
    with pytest.raises(LookupError):
        builtin_policy("unified").override({"conv2": "fp32"})


def test_an_unknown_policy_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownPolicyError) as caught:
        builtin_policy("unifed")
    assert str(caught.value) == (
        "'unifed' is no built-in policy; allowed are default, torch, unified, fp32, apex-o1, cpu, cuda, xpu, mps, "
        "mtia, maia, reference. Did you mean 'unified'?"
    )


def test_a_frameworks_own_dtype_is_known_by_how_it_is_written() -> None:
    class Dtype:
        def __init__(self, written: str) -> None:
            self.written = written

        def __str__(self) -> str:
            return self.written

    policy = Policy("p", {"mm": {"bfloat16": "fp32", "float16": "promote"}})
    assert policy.rule("mm", Dtype("torch.float16")) is policy.rule("mm", "float16") is CastPolicy.PROMOTE
    assert policy.rule("mm", Dtype("torch.bfloat16")) is CastPolicy.FP32
    with pytest.raises(PolicyError, match="is not a lower-precision dtype; allowed are bfloat16, float16"):
        policy.rule("mm", Dtype("torch.float32"))


def test_a_name_that_covers_different_rules_must_be_narrowed() -> None:
    policy = Policy("p", {"sum.default": "fp32"})
    with pytest.raises(PolicyError, match="'sum' covers ops with different rules in 'p'; name one of them"):
        policy.rule("sum")


def test_unified_is_the_cuda_list_and_what_only_the_cpu_list_has() -> None:
    unified, cuda, cpu = builtin_policy("unified").ops, device_table("cuda"), device_table("cpu")
    assert set(unified) == set(cuda) | set(cpu)
    assert all(unified[op] is rule for op, rule in cuda.items())
    assert all(unified[op] is rule for op, rule in cpu.items() if op not in cuda)


def test_fp32_has_every_listed_op_in_float32() -> None:
    listed = {op for device in devices() for op in (*device_table(device), *own_kernels(device))}
    assert set(builtin_policy("fp32").ops) == listed
    assert set(builtin_policy("fp32").ops.values()) == {CastPolicy.FP32}


def test_apex_o1_is_a_policy_for_every_device_with_repairs() -> None:
    policy = builtin_policy("apex-o1")
    assert (policy.name, policy.default, policy.repairs) == ("apex-o1", CastPolicy.FALLTHROUGH, True)
    assert builtin_policy("apex-o1") is policy
    assert {device: policy.on(device) for device in devices()} == dict.fromkeys(devices(), policy)
    assert policy.ops == apex_lists()
    assert builtin_names()[:5] == ("default", "torch", "unified", "fp32", "apex-o1")


@pytest.mark.parametrize(
    ("op", "rule"),
    [
        ("linear", "lower_precision_fp"),
        ("LSTM", "lower_precision_fp"),
        ("F.gelu", "fp32"),
        ("torch.var", "fp32"),
        ("F.softmin", "fp32_set_opt_dtype"),
        ("add.Tensor", "promote"),
        ("torch.cat", "promote"),
        ("F.binary_cross_entropy", "banned_lower_precision"),
        ("einsum", "fallthrough"),
        ("relu", "fallthrough"),
    ],
)
def test_apex_o1_has_the_rules_of_apexs_lists(op: str, rule: str) -> None:
    assert builtin_policy("apex-o1").rule(op) == rule


def test_the_ban_of_apex_o1_can_be_lifted() -> None:
    lifted = builtin_policy("apex-o1").override({"binary_cross_entropy": "fp32"})
    assert lifted.rule("binary_cross_entropy") is CastPolicy.FP32
    assert set(lifted.diff(builtin_policy("apex-o1"))) == {"aten::binary_cross_entropy"}


def test_apex_o1_is_for_pytorchs_ops_only() -> None:
    with pytest.raises(
        UnknownPolicyError, match="'apex-o1' is for PyTorch's ops, and 'jax' has no policy of that name"
    ):
        builtin_policy("apex-o1", framework="jax")


@pytest.mark.parametrize("name", ["eq", "ne", "ge", "gt", "le", "lt"])
def test_the_comparison_operators_are_names_for_ops(name: str) -> None:
    assert vocabulary().resolve(f"Tensor.__{name}__") == vocabulary().resolve(name)


def test_cudnn_rnn_has_no_rule_in_the_tables() -> None:
    assert own_kernels("cuda") == {"aten::_cudnn_rnn"}
    assert "aten::_cudnn_rnn" not in device_table("cuda")
    assert "aten::_cudnn_rnn" not in builtin_policy("unified").ops


def test_explain_says_rule_origin_and_effect() -> None:
    policy = builtin_policy("unified").override({"softmax": "lower_precision_fp"}, name="quick")
    cast = "every eligible input is cast to the region's dtype"
    assert str(policy.explain("F.softmax")).splitlines() == [
        "F.softmax under 'quick'",
        "aten::softmax.int: lower_precision_fp",
        "  from the policy 'quick'",
        f"  in a bfloat16 region {cast} (float32 -> bfloat16, float16 -> bfloat16; bfloat16, float64, int64 as they come)",
        f"  in a float16 region {cast} (float32 -> float16, bfloat16 -> float16; float16, float64, int64 as they come)",
    ]
    assert policy.explain("layer_norm").ops[0].origin == "the policy 'unified'"
    assert policy.explain("softmax").ops[0].inputs["float16"]["float32"] == "float16"


def test_explain_looks_inside_a_call_that_is_not_listed_itself() -> None:
    explanation = builtin_policy("torch").explain("cross_entropy", device="cuda")
    assert explanation.ops[0].rule is None
    assert {op.op for op in explanation.inside} == {"aten::log_softmax.int", "aten::nll_loss", "aten::nll_loss2d"}
    assert "aten::_cudnn_rnn: a kernel of the framework's own" in str(
        builtin_policy("torch").explain("LSTM", device="cuda")
    )


def test_a_policy_of_another_framework_is_refused() -> None:
    class Foreign(Policy):
        framework = "jax"  # type: ignore[assignment]

    policy = object.__new__(Foreign)
    object.__setattr__(policy, "name", "theirs")
    with pytest.raises(PolicyError, match="policy 'theirs' is for 'jax', and this is the adapter for 'torch'"):
        resolve_policy(policy)
