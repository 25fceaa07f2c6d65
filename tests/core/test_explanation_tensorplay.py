"""What mezzo says of an op of TensorPlay: who casts it, how, and what its repairs do; never of another framework."""

from __future__ import annotations

import pytest

from mezzo import CastPolicy, Policy, UnknownOpError, builtin_policy
from mezzo.builtin import builtin_names
from mezzo.tables import repairs
from mezzo.vocabulary import vocabulary


def default() -> Policy:
    return builtin_policy("default", framework="tensorplay")


@pytest.mark.parametrize("name", builtin_names("tensorplay"))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_op_is_served_by_mezzo_and_no_other_framework_is_named(name: str, device: str) -> None:
    policy = builtin_policy(name, framework="tensorplay")
    for op in {*policy.on(device).ops, *repairs("tensorplay"), "relu", "add_", "view"}:
        explanation = policy.explain(op, device=device)
        assert explanation.ops[0].op == op
        assert {entry.served_by for entry in explanation.ops} == {"mezzo"}, op
        assert not any(word in str(explanation) for word in ("PyTorch", "JAX", "primitive", "XLA")), op


def test_every_alias_can_be_explained() -> None:
    for name in vocabulary("tensorplay").aliases:
        explanation = default().explain(name, device="cpu")
        assert explanation.ops or explanation.inside, name
        assert all(entry.framework == "tensorplay" for entry in explanation.ops + explanation.inside)


def test_an_op_that_is_cast() -> None:
    assert str(default().explain("F.softmax", device="cuda")).splitlines() == [
        "F.softmax under 'default' on cuda",
        "softmax: fp32",
        "  from the table 'tensorplay/cuda'",
        (
            "  every eligible input is cast to float32 "
            "(bfloat16 -> float32, float16 -> float32; float32, float64, int64 as they come)"
        ),
        "  cast by mezzo",
    ]


def test_an_op_that_is_not_listed_is_cast_by_nobody() -> None:
    assert str(default().explain("relu", device="cpu")).splitlines() == [
        "relu under 'default' on cpu",
        "relu: not listed",
        "  from the default of 'default' for ops it does not list",
        "  runs in the dtypes that come in",
    ]


def test_without_a_device_the_rule_is_left_to_it() -> None:
    (entry,) = default().explain("mm").ops
    assert (entry.rule, entry.served_by) == ("device", "")


@pytest.mark.parametrize(
    ("op", "text"),
    [
        ("mm", "a call that fails over dtypes is made again with its inputs in the widest of their dtypes, float64"),
        (
            "layer_norm",
            "inputs of several float dtypes are cast to the widest, or the result or gradient would be wrong",
        ),
        ("index_put_", "what is written into a tensor is cast to its dtype"),
        ("max_pool2d", "it has no right kernel for bfloat16 and float16, and runs in float32 instead"),
    ],
)
def test_repairs_are_said_where_they_are_on(op: str, text: str) -> None:
    (entry,) = default().explain(op, device="cpu").ops
    assert text in entry.repair
    assert f"  {entry.repair}" in entry.lines()
    (plain,) = builtin_policy("tensorplay", framework="tensorplay").explain(op, device="cpu").ops
    assert plain.repair == ""
    (banned,) = default().override({op: "banned"}).explain(op, device="cpu").ops
    assert banned.repair == ""


def test_a_composition_is_shown_by_its_parts() -> None:
    explanation = default().explain("nn.LSTMCell", device="cpu")
    assert explanation.ops == ()
    assert [entry.op for entry in explanation.inside] == ["linear", "add", "sigmoid", "tanh", "mul"]
    text = str(explanation)
    assert "\nno op of its own; it is composed of\nlinear: lower_precision_fp\n" in text
    assert "\nsigmoid: not listed\n" in text


def test_a_loss_that_is_composed_has_the_rule_of_its_op() -> None:
    explanation = default().explain("nn.CrossEntropyLoss", device="cpu")
    assert [(entry.op, entry.rule) for entry in explanation.ops] == [("cross_entropy_loss", "fp32")]
    assert [entry.op for entry in explanation.inside] == ["log_softmax", "nll_loss", "nll_loss2d"]


def test_an_op_whose_function_enters_another_is_shown_with_it() -> None:
    explanation = default().explain("kl_div", device="cpu")
    assert [entry.op for entry in explanation.ops] == ["kl_div", "tp_kl_div"]
    assert explanation.inside == ()


def test_an_op_whose_function_is_composed_is_shown_with_the_parts() -> None:
    explanation = default().explain("bilinear", device="cpu")
    assert [entry.op for entry in explanation.ops] == ["bilinear"]
    assert [entry.op for entry in explanation.inside] == ["matmul"]
    assert "\nthe function of this name is composed of\nmatmul: lower_precision_fp\n" in str(explanation)


def test_the_origin_of_an_override_and_both_dtypes() -> None:
    policy = default().override({"exp": {"bfloat16": "promote", "float16": "fp32"}}, name="mine")
    (entry,) = policy.explain("exp", device="cpu").ops
    assert entry.origin == "the policy 'mine'"
    assert entry.inputs["float16"]["bfloat16"] == "float32"
    assert entry.inputs["bfloat16"]["bfloat16"] == "bfloat16"
    assert "in a float16 region every eligible input is cast to float32" in str(policy.explain("exp"))


def test_a_default_for_all_that_computes_is_cast_by_mezzo() -> None:
    policy = Policy("mine", default="fp32", framework="tensorplay")
    (entry,) = policy.explain("relu", device="cpu").ops
    assert (entry.rule, entry.lines()[-1]) == (CastPolicy.FP32, "  cast by mezzo")


def test_an_unknown_name_raises() -> None:
    with pytest.raises(UnknownOpError, match=r"'sofmax' is no op of TensorPlay\. Did you mean 'softmax'"):
        default().explain("sofmax", device="cpu")
