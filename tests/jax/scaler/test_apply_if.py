"""`apply_if`: takes the step or leaves everything as it was, for any pytree, and says what does not fit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mezzo.errors import OptionError, ScalingError
from mezzo.jax.grad_check import GradCheck
from mezzo.jax.stepping import apply_if

each_skip = pytest.mark.parametrize("skip", ["cond", "select"])


def state() -> dict[str, Any]:
    return {
        "weight": jnp.arange(3.0),
        "count": jnp.int32(4),
        "key": jax.random.key(1),
        "old key": jax.random.PRNGKey(2),
        "nothing": None,
        "empty": (),
        "act": jax.nn.relu,
        "name": "net",
        "flag": True,
        "number": 3,
    }


def stepped(given: dict[str, Any]) -> dict[str, Any]:
    return {
        **given,
        "weight": given["weight"] + 1,
        "count": given["count"] + 1,
        "key": jax.random.fold_in(given["key"], 1),
        "old key": jax.random.fold_in(given["old key"], 1),
        "flag": given["flag"] ^ True,
        "number": given["number"] + 1,
    }


def plain(tree: Any) -> list[Any]:
    """Give the leaves as NumPy arrays where they are arrays."""
    leaves = []
    for leaf in jax.tree.leaves(tree):
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        leaves.append(leaf if callable(leaf) or isinstance(leaf, str) else np.asarray(leaf))
    return leaves


@each_skip
@pytest.mark.parametrize("as_check", [False, True])
def test_a_step_is_taken_or_left_out_whole(skip: Any, as_check: bool) -> None:
    for finite in (True, False):
        flag = jnp.array(finite)
        check = GradCheck(jnp.array(False), ~flag) if as_check else flag
        found = apply_if(check, stepped, state(), skip=skip)
        expected = stepped(state()) if finite else state()
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for new, wanted in zip(plain(found), plain(expected), strict=True):
            np.testing.assert_array_equal(new, wanted)


@each_skip
def test_several_operands_come_back_as_a_tuple(skip: Any) -> None:
    @jax.jit
    def run(finite: Any, weight: Any, moments: Any) -> Any:
        return apply_if(finite, lambda w, m: (w + 1, {"m": m["m"] * 2}), weight, moments, skip=skip)

    for finite, expected in ((True, (2.0, 4.0)), (False, (1.0, 2.0))):
        weight, moments = run(finite, jnp.array(1.0), {"m": jnp.array(2.0)})
        assert (float(weight), float(moments["m"])) == expected


@each_skip
def test_under_vmap_each_member_steps_or_not(skip: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 2)

    def one(finite: Any, weight: Any, key: Any) -> Any:
        return apply_if(finite, lambda w, k: (w + 1, jax.random.fold_in(k, 7)), weight, key, skip=skip)

    weights, new = jax.jit(jax.vmap(one))(jnp.array([True, False]), jnp.zeros((2, 3)), keys)
    np.testing.assert_array_equal(weights, [[1.0] * 3, [0.0] * 3])
    changed = (jax.random.key_data(new) != jax.random.key_data(keys)).any(axis=1)
    assert changed.tolist() == [True, False]


def test_only_a_branch_leaves_the_work_undone() -> None:
    def run(finite: Any, weight: Any, skip: Any) -> Any:
        return apply_if(finite, jnp.sin, weight, skip=skip)

    for skip, primitive in (("cond", "cond"), ("select", "select_n")):
        equations = jax.make_jaxpr(run, static_argnums=2)(True, jnp.ones(2), skip).eqns
        assert primitive in {equation.primitive.name for equation in equations}
        assert ("sin" in {equation.primitive.name for equation in equations}) == (skip == "select")


@pytest.mark.parametrize("finite", [True, np.True_, GradCheck(np.False_, np.False_)])
def test_a_verdict_that_is_known_makes_no_branch(finite: Any) -> None:
    taken = jax.make_jaxpr(lambda w: apply_if(finite, lambda w: w + 1, w))(1.0)
    assert [equation.primitive.name for equation in taken.eqns] == ["add"]
    assert not jax.make_jaxpr(lambda w: apply_if(False, lambda w: w + 1, w))(1.0).eqns


def test_donated_buffers_are_used_again() -> None:
    def run(weight: Any, grad: Any) -> Any:
        return apply_if(GradCheck.of(grad), lambda weight: weight - grad, weight)

    weight = jnp.ones(1000)
    before = weight.unsafe_buffer_pointer()
    after = jax.jit(run, donate_argnums=0)(weight, jnp.ones(1000))
    assert after.unsafe_buffer_pointer() == before
    assert weight.is_deleted()


# What does not fit

each_verdict = pytest.mark.parametrize("finite", [True, jnp.array(True)], ids=["known", "traced"])


@each_verdict
@pytest.mark.parametrize(
    ("update", "words"),
    [
        (
            lambda s: {**s, "w": s["w"].astype(jnp.float16)},
            r"operand\['w'\] was float32\[2\] and became float16\[2\]\.",
        ),
        (lambda s: {**s, "w": s["w"][None]}, r"operand\['w'\] was float32\[2\] and became float32\[1,2\]"),
        (
            lambda s: {**s, "low": s["low"] + s["w"]},
            r"\['low'\] was bfloat16\[2\].*wrap the optimizer in mezzo\.jax\.master",
        ),
        (
            lambda s: {"w": s["w"]},
            r"another structure than it was given \(missing: operand\['low'\], operand\['name'\]\)",
        ),
        (lambda s: {**s, "more": s["w"]}, r"\(added: operand\['more'\]\)"),
        (lambda s: (s,), "For one operand it must return the new operand"),
        (lambda s: {**s, "name": "other"}, r"operand\['name'\] is no array, and changed from 'net' to 'other'"),
        (lambda s: {**s, "w": "text"}, r"operand\['w'\] was float32\[2\] and became 'text'"),
    ],
    ids=["dtype", "shape", "low", "missing", "added", "tuple", "static", "no array"],
)
def test_an_update_that_changes_more_than_values_is_refused_by_leaf(finite: Any, update: Any, words: str) -> None:
    given = {"w": jnp.ones(2), "low": jnp.ones(2, jnp.bfloat16), "name": "net"}
    with pytest.raises(ScalingError, match=words):
        apply_if(finite, update, given)


def test_of_several_operands_the_leaf_is_named_with_its_place() -> None:
    with pytest.raises(ScalingError, match=r"operand\[1\]\['m'\] was float32\[\] and became int32\[\]"):
        apply_if(jnp.array(True), lambda w, s: (w, {"m": jnp.int32(s["m"])}), jnp.ones(2), {"m": jnp.ones(())})


def test_skip_is_one_of_two_words() -> None:
    with pytest.raises(OptionError, match="skip must be 'cond' or 'select', not 'where'"):
        apply_if(True, lambda w: w, 1.0, skip="where")  # type: ignore[arg-type]
