"""What cannot be asked for: each wrong option says what came, what is allowed and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mezzo import Policy, PolicyError, UnknownOpError, UnknownPolicyError
from mezzo.builtin import builtin_policy
from mezzo.errors import DtypeError, MezzoError, OptionError, PolicyFileError
from mezzo.jax import autocast, cast_inputs


def identity(x: jax.Array) -> jax.Array:
    return x


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("float32", r"computes in bfloat16 or float16, got 'float32'.*leave autocast away: enabled=False"),
        ("float64", r"computes in bfloat16 or float16, got 'float64'"),
        ("bfloat", r"got 'bfloat'\. Did you mean 'bfloat16'"),
        ("bf16", r"got 'bf16'\. Did you mean 'bfloat16'"),
        (jnp.float32, r"enabled=False"),
        (np.dtype("int8"), r"got dtype\('int8'\)"),
        (jnp.float8_e4m3fn, r"computes in bfloat16 or float16"),
        (None, r"computes in bfloat16 or float16, got None"),
        (16, r"computes in bfloat16 or float16, got 16"),
    ],
    ids=str,
)
def test_another_dtype_is_refused_at_once(dtype: Any, text: str) -> None:
    with pytest.raises(DtypeError, match=text):
        autocast(identity, dtype)
    with pytest.raises(DtypeError, match=text):
        autocast(dtype=dtype)
    with pytest.raises(DtypeError, match=text):
        cast_inputs(identity, dtype)


def test_a_dtype_of_torch_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(DtypeError, match=r"computes in bfloat16 or float16, got torch\.bfloat16"):
        autocast(identity, torch.bfloat16)


WORDS = [
    ("carry", "pinned", r"carry='pinned' is not allowed; allowed are 'pin', 'fixpoint'\. Did you mean 'pin'\?"),
    ("carry", None, r"carry=None is not allowed; allowed are 'pin', 'fixpoint'"),
    ("while_", "on", r"while_='on' is not allowed; allowed are 'off', 'body'"),
    ("while_", True, r"while_=True is not allowed"),
    ("bias", "adopt", r"bias='adopt' is not allowed; .*Did you mean 'adapt'\?"),
    ("outputs", "float16", r"outputs='float16' is not allowed; allowed are 'traced', 'flow', 'float32'"),
    ("outputs", jnp.float32, r"outputs=.* is not allowed"),
    ("custom_vjp", "entered", r"custom_vjp='entered' is not allowed; .*Did you mean 'enter'\?"),
    (
        "custom_vjp",
        {"flash": "open"},
        r"custom_vjp='open' is not allowed for the function 'flash'; allowed are 'opaque', 'enter'",
    ),
    ("custom_vjp", {identity: "enter"}, r"custom_vjp maps names of functions to words.*Pass its __name__"),
    ("custom_vjp", ["flash"], r"custom_vjp takes 'opaque', 'enter', or a mapping from function name"),
    ("enabled", "yes", r"enabled='yes' is not allowed; allowed are True, False"),
    ("enabled", None, r"enabled=None is not allowed"),
]


@pytest.mark.parametrize(
    ("option", "value", "text"), WORDS, ids=[f"{place} {word[0]}" for place, word in enumerate(WORDS)]
)
def test_another_word_is_refused_at_once(option: str, value: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text) as caught:
        autocast(identity, **{option: value})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, MezzoError)


def test_cast_inputs_refuses_another_word() -> None:
    with pytest.raises(OptionError, match=r"outputs='traced' is not allowed; allowed are 'float32', 'flow'"):
        cast_inputs(identity, outputs="traced")  # type: ignore[arg-type]


@pytest.mark.parametrize("thing", [3, "bfloat16", jnp.ones(2), [identity]], ids=lambda each: type(each).__name__)
def test_what_cannot_be_called_is_refused(thing: Any) -> None:
    name = type(thing).__name__
    with pytest.raises(OptionError, match=rf"autocast takes a function, got {name}.*@autocast\(dtype='bfloat16'\)"):
        autocast(thing)
    with pytest.raises(OptionError, match=rf"cast_inputs takes a function, got {name}"):
        cast_inputs(thing)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("defalt", r"'defalt'.*[Dd]id you mean '?default"),
        ("unifed", r"[Dd]id you mean '?unified"),
        ("cuda", r"'cuda'"),
        ("torch", r"'torch'"),
    ],
)
def test_a_policy_name_that_jax_has_not(policy: str, text: str) -> None:
    with pytest.raises(UnknownPolicyError, match=text):
        autocast(identity, policy=policy)


def test_the_error_lists_the_names_there_are() -> None:
    with pytest.raises(UnknownPolicyError, match=r"default.*unified.*fp32.*xla"):
        autocast(identity, policy="nothing like it")


@pytest.mark.parametrize("policy", [builtin_policy("unified"), Policy("mine", {"matmul": "fp32"})], ids=str)
def test_a_policy_for_torch_is_refused(policy: Policy) -> None:
    with pytest.raises(PolicyError, match=r"torch.*jax"):
        autocast(identity, policy=policy)


@pytest.mark.parametrize("policy", [3, {"exp": "fp32"}, identity], ids=lambda each: type(each).__name__)
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises((PolicyError, TypeError), match=r"polic"):
        autocast(identity, policy=policy)


def test_a_file_that_is_missing_or_wrong(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        autocast(identity, policy=tmp_path / "missing.toml")
    path = tmp_path / "torch.toml"
    Policy("mine", {"matmul": "fp32"}).save(path)
    with pytest.raises(PolicyError, match=r"torch.*jax"):
        autocast(identity, policy=path)
    path.write_text('framework = "jax"\n[ops]\nexpp = "fp32"\n')
    with pytest.raises(UnknownOpError, match=r"expp.*Did you mean 'exp"):
        autocast(identity, policy=path)
    path.write_text("framework = jax")
    with pytest.raises(PolicyFileError):
        autocast(identity, policy=path)


DEFAULT = builtin_policy("default", framework="jax")


@pytest.mark.parametrize(
    ("name", "rule", "error", "text"),
    [
        ("dot_generel", "fp32", UnknownOpError, r"'dot_generel'.*Did you mean 'dot_general'"),
        ("aten::mm", "fp32", UnknownOpError, r"aten::mm"),
        ("exp", "fp23", PolicyError, r"'fp23'.*[Dd]id you mean 'fp32'"),
        ("exp", "fp32_set_opt_dtype", PolicyError, r"fp32_set_opt_dtype.*use fp32|use fp32"),
        ("exp", "fp32_append_dtype", PolicyError, r"use fp32"),
        ("scan", "fp32", PolicyError, r"scan.*fallthrough"),
        ("jit", "lower_precision_fp", PolicyError, r"jit.*fallthrough"),
        ("exp", {"bfloat16": "fp32"}, PolicyError, r"float16"),
        ("exp", {"float32": "fp32"}, PolicyError, r"'float32' is not a lower-precision dtype"),
    ],
    ids=str,
)
def test_a_rule_that_cannot_be(name: str, rule: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DEFAULT.override({name: rule})
