"""Names of JAX's primitives: each spelling finds its primitive, and a composition says of what it consists."""

from __future__ import annotations

import pytest

from mezzo import Policy, UnknownOpError, builtin_policy
from mezzo.vocabulary import Vocabulary, vocabulary

words = vocabulary.__wrapped__("jax")


def default() -> Policy:
    return builtin_policy("default", framework="jax")


@pytest.mark.parametrize(
    ("written", "primitive"),
    [
        ("exp", "exp"),
        ("lax.exp", "exp"),
        ("jax.lax.exp", "exp"),
        ("jnp.exp", "exp"),
        ("jax.numpy.exp", "exp"),
        ("lax.exp_p", "exp"),
        ("exp_p", "exp"),
        ("jax.lax.linalg.cholesky", "cholesky"),
        ("jnp.matmul", "dot_general"),
        ("matmul", "dot_general"),
        ("einsum", "dot_general"),
        ("jnp.dot", "dot_general"),
        ("jnp.linalg.multi_dot", "dot_general"),
        ("lax.conv", "conv_general_dilated"),
        ("lax.ragged_dot", "ragged_dot_general"),
        ("jax.nn.sigmoid", "logistic"),
        ("nn.sigmoid", "logistic"),
        ("sum", "reduce_sum"),
        ("jnp.sum", "reduce_sum"),
        ("jnp.power", "pow"),
        ("jnp.where", "select_n"),
        ("jnp.fft.rfft", "fft"),
        ("jsp.special.gammaln", "lgamma"),
        ("jax.scipy.special.erfinv", "erf_inv"),
        ("lax.psum_scatter", "reduce_scatter"),
        ("scatter_add", "scatter-add"),
        ("scatter-add", "scatter-add"),
        ("jax.random.split", "random_split"),
        ("jnp.split", "split"),
        ("pjit", "jit"),
        ("jax.jit", "jit"),
        ("jax.checkpoint", "remat2"),
        ("remat", "remat2"),
        ("jax.custom_vjp", "custom_vjp_call"),
        ("custom_vjp_call_jaxpr", "custom_vjp_call"),
        ("lax.while_loop", "while"),
        ("lax.switch", "cond"),
        ("core_call", "call"),
        ("reduced_vary_cast_p", "reduced_vary_cast_p"),
        ("reciprocal", "integer_pow"),
    ],
)
def test_each_spelling_finds_its_primitive(written: str, primitive: str) -> None:
    assert words.resolve(written) == (primitive,)
    assert words.inside(written) == ()


@pytest.mark.parametrize(
    ("bare", "of_numpy"),
    [("max", "reduce_max"), ("min", "reduce_min"), ("broadcast_to", "broadcast_in_dim")],
)
def test_a_name_that_means_something_else_in_numpy(bare: str, of_numpy: str) -> None:
    assert words.resolve(bare) == words.resolve(f"lax.{bare}") == (bare,)
    assert words.resolve(f"jnp.{bare}") == words.resolve(f"jax.numpy.{bare}") == (of_numpy,)


def test_each_primitive_is_its_own_name() -> None:
    assert all(words.resolve(op) == (op,) for op in words.traits)


def test_each_alias_reaches_primitives_that_are_listed() -> None:
    for name, alias in words.aliases.items():
        assert bool(alias.ops) != bool(alias.inside), name
        assert name not in words.traits, name
        assert {*alias.ops, *alias.inside} <= set(words.traits), name


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("softmax", "reduce_max, sub, exp, reduce_sum, div"),
        ("jax.nn.softmax", "reduce_max, sub, exp, reduce_sum, div"),
        ("layer_norm", "reduce_sum, div, square, sub, add, rsqrt, mul"),
        ("gelu", "integer_pow, erfc, mul, add, tanh"),
        ("logsumexp", "reduce_max, sub, exp, reduce_sum, log, add"),
        ("jnp.mean", "reduce_sum, div"),
        ("jax.nn.relu", "max"),
    ],
)
def test_a_composition_is_an_error_that_names_its_parts(name: str, parts: str) -> None:
    with pytest.raises(UnknownOpError) as caught:
        Policy("mine", {name: "fp32"}, framework="jax")
    assert str(caught.value) == (
        f"{name!r} is no primitive of JAX: it is traced as {parts}, and the rules of these decide. Name them."
    )
    assert words.inside(name) == tuple(parts.split(", "))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sofmax", "'sofmax' is no primitive of JAX. Did you mean 'softmax'"),
        ("lax.dot_genral", "'lax.dot_genral' is no primitive of JAX. Did you mean 'dot_general'"),
        ("qqqq", r"'qqqq' is no primitive of JAX\. `mezzo ops --framework jax` lists them; .*register_primitive\.$"),
        ("aten::mm", "'aten::mm' is no primitive of JAX: names with a namespace are PyTorch's"),
        ("", "'' is no primitive of JAX"),
        (3, "names of primitives are strings such as 'dot_general', got 3"),
    ],
)
def test_an_unknown_name_is_told_what_to_do(name: str, text: str) -> None:
    with pytest.raises(UnknownOpError, match=text):
        words.resolve(name)


def test_a_primitive_that_is_learned_takes_rules() -> None:
    own = vocabulary.__wrapped__("jax")
    own.learn({"my_kernel": frozenset({"compute"})})
    assert own.resolve("my_kernel") == ("my_kernel",)
    assert own.covers("my_kernel") == ("my_kernel",)
    own.learn({"exp": frozenset()})
    assert own.traits["exp"] == {"compute"}, "what is known keeps its traits"
    with pytest.raises(UnknownOpError):
        words.resolve("my_kernel")


def test_pytorchs_names_are_as_they_were() -> None:
    torch = vocabulary("torch")
    assert type(torch) is Vocabulary
    assert torch.resolve("softmax") == ("aten::softmax.int",)
    with pytest.raises(UnknownOpError, match="'dot_general' is no op"):
        torch.resolve("dot_general")


# Explanations


def test_explain_says_what_a_primitive_gets_and_names_no_device() -> None:
    assert str(default().explain("jnp.matmul")).splitlines() == [
        "jnp.matmul under 'default'",
        "dot_general: lower_precision_fp",
        "  from the policy 'default'",
        (
            "  every float operand is cast to the region's dtype, and the result has it; "
            "a call with a precision of its own is left alone"
        ),
    ]


@pytest.mark.parametrize(
    ("op", "effects"),
    [
        ("exp", ["every float operand is cast to float32"]),
        ("tanh", ["it runs in the dtype that comes in"]),
        ("scan", ["the primitives inside it follow this policy"]),
        ("dynamic_update_slice", ["the other float operands are cast to the dtype of the first"]),
        ("pallas_call", ["it runs in exactly the dtypes that were traced"]),
        ("convert_element_type", ["the cast that the function itself asks for is made"]),
        (
            "erfc",
            [
                "in a bfloat16 region it runs in the dtype that comes in",
                "in a float16 region every float operand is cast to float32",
            ],
        ),
    ],
)
def test_explain_says_what_happens(op: str, effects: list[str]) -> None:
    assert [line.strip() for line in str(default().explain(op)).splitlines()[3:]] == effects


@pytest.mark.parametrize(("op", "option"), [("while", "while_='body'"), ("custom_vjp", "custom_vjp='enter'")])
def test_explain_names_the_option_that_lets_autocast_enter(op: str, option: str) -> None:
    assert f"unless autocast({option}) asks" in str(default().explain(op))


@pytest.mark.parametrize("rule", ["banned", "banned_lower_precision", "fallthrough", "opaque", "promote"])
def test_explain_has_words_for_each_rule(rule: str) -> None:
    changed = str(default().override({"exp": rule}, name="mine").explain("exp"))
    assert changed.splitlines()[1:3] == [f"exp: {rule}", "  from the policy 'mine'"]
    assert len(changed.splitlines()) == 4
    assert "PyTorch" not in changed
    assert "kernel" not in changed


def test_explain_shows_what_is_inside_a_composition() -> None:
    explanation = default().explain("softmax", device="xla")
    assert explanation.ops == ()
    assert [(op.op, str(op.rule)) for op in explanation.inside] == [
        ("reduce_max", "fallthrough"),
        ("sub", "promote"),
        ("exp", "fp32"),
        ("reduce_sum", "fp32"),
        ("div", "promote"),
    ]
    heading, second, *_ = str(explanation).splitlines()
    assert (heading, second) == ("softmax under 'default' on xla", "no primitive of its own; it is traced as")


def test_explain_gives_the_dtypes_as_data() -> None:
    (dot,) = default().explain("dot").ops
    assert dot.inputs["float16"]["float32"] == "float16"
    assert dot.inputs["float16"]["float64"] == "float64"
    (erfc,) = default().explain("erfc").ops
    assert (erfc.inputs["bfloat16"]["bfloat16"], erfc.inputs["float16"]["float16"]) == ("bfloat16", "float32")
    (opaque,) = default().explain("pallas_call").ops
    assert opaque.inputs == {"bfloat16": {}, "float16": {}}
    assert (opaque.served_by, opaque.repair, opaque.framework) == ("", "", "jax")


def test_explain_says_where_the_rule_of_an_unlisted_primitive_comes_from() -> None:
    policy = Policy("mine", {"dot": "lower_precision_fp"}, framework="jax")
    assert policy.explain("exp").ops[0].origin == "the default of 'mine' for ops it does not list"
    assert policy.explain("reshape").ops[0].origin.startswith("the table 'jax/xla': it does not compute")
    assert builtin_policy("xla", framework="jax").explain("exp").ops[0].origin == "the table 'jax/xla'"
