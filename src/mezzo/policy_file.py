"""Policies as TOML files: what people keep under version control and hand to each other.

A file looks like this; every key may be left out::

    name = "careful"          # default: the name of the file
    base = "unified"          # start from a built-in policy or a device's table ("cuda"); default: from nothing
    default = "fallthrough"   # for ops that are not listed; for JAX, if left out: "opaque"
    framework = "torch"       # or "jax", "tensorplay"
    repairs = true            # mend calls that the framework's autocast lets down; default: that of the base, else true

    [ops]
    softmax = "fp32"
    "sum.dim_IntList" = "fallthrough"
    layer_norm = { bfloat16 = "fallthrough", float16 = "fp32" }
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .builtin import builtin_policy
from .decision import LOW_DTYPES
from .errors import MezzoError, PolicyError, PolicyFileError, UnknownOpError, UnknownPolicyError, near
from .policy import Policy
from .rules import ByDtype, Rule
from .vocabulary import base_name, vocabulary

__all__ = ["read_policy", "write_policy"]

_KEYS = ("name", "framework", "base", "default", "repairs", "ops")
_KINDS = {"ops": (dict, "a table"), "repairs": (bool, "true or false")}


def read_policy(path: Path) -> Policy:
    """Read a policy file; the work behind `mezzo.Policy.load`.

    Args:
        path: The file.

    Returns:
        The policy.

    Raises:
        PolicyFileError: The file is not valid TOML or has a wrong key or value. The message names the file.
        UnknownOpError: It names an op that does not exist.
        FileNotFoundError: There is no such file.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        msg = f"{path}: not a valid TOML file: {error}"
        raise PolicyFileError(msg) from None
    _check_keys(path, content)
    try:
        return _build(content, path.stem)
    except UnknownOpError as error:
        msg = f"{path}: {error}"
        raise UnknownOpError(msg) from None
    except MezzoError as error:
        msg = f"{path}: {error}"
        raise PolicyFileError(msg) from None


def _check_keys(path: Path, content: Mapping[str, Any]) -> None:
    for key, value in content.items():
        if key not in _KEYS:
            msg = f"{path}: unknown key {key!r}; allowed are {', '.join(_KEYS)}.{near(key, _KEYS)}"
            raise PolicyFileError(msg)
        wanted, kind = _KINDS.get(key, (str, "a string"))
        if not isinstance(value, wanted):
            msg = f"{path}: {key!r} must be {kind}, got {value!r}."
            raise PolicyFileError(msg)


def _build(content: Mapping[str, Any], stem: str) -> Policy:
    name = content.get("name", stem)
    framework = content.get("framework", "torch")
    ops = content.get("ops", {})
    for op, rule in ops.items():
        if isinstance(rule, dict) and rule and not set(rule) & set(LOW_DTYPES):
            msg = f'{op!r} has no rule but {rule!r}; a name with a dot goes in quotes: "{op}.{next(iter(rule))}" = ...'
            raise PolicyError(msg)
    if "base" not in content:
        default, repairs = content.get("default"), content.get("repairs")
        return Policy(name, ops, default=default, framework=framework, repairs=repairs)
    merged = _base(content["base"], framework).override(ops, name=name)
    default, repairs = content.get("default", merged.default), content.get("repairs", merged.repairs)
    if (default, repairs) == (merged.default, merged.repairs):
        return merged
    return Policy(name, merged.ops, default=default, framework=framework, repairs=repairs, parent=merged)


def _base(name: str, framework: str) -> Policy:
    try:
        return builtin_policy(name, framework=framework)
    except UnknownPolicyError as error:
        msg = f"base: {error}"
        raise PolicyError(msg) from None


def write_policy(policy: Policy, path: Path) -> None:
    """Write a policy file; the work behind `mezzo.Policy.save`.

    Overloads are grouped under their op's name where all of them have one rule, so that the file is short and still
    covers an overload that a later release adds.

    Args:
        policy: The policy.
        path: Where to write; an existing file is replaced.
    """
    lines = [
        f"name = {_quoted(policy.name)}",
        f"framework = {json.dumps(policy.framework)}",
        f"default = {json.dumps(str(policy.default))}",
        f"repairs = {json.dumps(policy.repairs)}",
        "",
        "[ops]",
        *(f"{json.dumps(name)} = {_literal(rule)}" for name, rule in sorted(_grouped(policy).items())),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _grouped(policy: Policy) -> dict[str, Rule]:
    words = vocabulary(policy.framework)
    grouped: dict[str, Rule] = {}
    for op, rule in policy.ops.items():
        base = base_name(op)
        covered = words.covers(base)
        whole = op in covered and all(policy.ops.get(other) == rule for other in covered)
        # A bare name without overload means all overloads, so the default overload alone has to be spelled out.
        single = words.alone(op) if op in covered and covered != (op,) else op
        grouped[base if whole else single] = rule
    return grouped


def _quoted(text: str) -> str:
    # TOML's basic strings are JSON's, but for surrogate pairs, which JSON writes in ASCII, and for the delete character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _literal(rule: Rule) -> str:
    if isinstance(rule, ByDtype):
        return f'{{ bfloat16 = "{rule.bfloat16}", float16 = "{rule.float16}" }}'
    return f'"{rule}"'
