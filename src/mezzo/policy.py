"""`Policy`: the readable, editable value that says which op runs in which dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from . import tables
from .decision import CastPolicy
from .errors import PolicyError
from .explanation import Explanation, explain
from .policy_options import DEVICE, default_rule, low_name, mends
from .rules import ByDtype, Rule, RuleLike, device_rules, resolve_rules
from .vocabulary import vocabulary

__all__ = ["DEVICE", "Policy"]


@dataclass(frozen=True, eq=False, init=False)
class Policy:
    """A table from op to cast policy, with a rule for the ops it does not list.

    A policy is a value: every method that changes something returns a new one. Two policies are equal when they do the
    same, whatever their names. It may be shared between threads.

    Args:
        name: A label for messages and tables.
        ops: Op names to rules. A rule is a `CastPolicy` or its name, or a mapping ``{"bfloat16": ..., "float16": ...}``
            where they differ. Names may be spelled as `mezzo.vocabulary.Vocabulary.resolve` understands them; a name
            without an overload covers all overloads but ``out``. Later entries win over earlier ones.
        default: What happens to other ops: ``"fallthrough"`` (they run in their inputs' dtypes, and the ops inside them
            follow this policy), ``"device"`` (the device's own table decides), or another cast policy, which then covers
            every op that computes with tensors and returns new ones. By default ``"fallthrough"``; for JAX ``"opaque"``
            (they run in the dtypes that were traced), while ``"device"`` is for the others, and primitives that do not
            compute, such as ``reshape`` and ``scan``, keep the rule of mezzo's table.
        framework: Whose ops the names are.
        repairs: Whether a call that PyTorch's autocast would let down is mended: one whose mixture of dtypes, or whose
            lower-precision dtype, the op has no kernel for, and one that would be served the stale cast of a weight. False
            gives PyTorch's behaviour, faults and all. Calls that work there are not affected. The same holds for
            TensorPlay, where a call that would compute wrongly is mended, too. By default True; for JAX,
            which traces a function before autocast changes it, there is nothing to mend and it is False.

    Attributes:
        ops: A read-only mapping from canonical op name to `Rule`.

    Raises:
        UnknownOpError: A name is no op; near names are offered.
        PolicyError: A rule is not a cast policy, or cannot be applied to the op.

    Example:
        >>> policy = Policy("mine", {"matmul": "lower_precision_fp", "softmax": "fp32"})
        >>> policy.rule("F.softmax")
        <CastPolicy.FP32: 'fp32'>
        >>> policy.override({"softmax": "fallthrough"}).diff(policy)
        {'aten::softmax.int': (<CastPolicy.FALLTHROUGH: 'fallthrough'>, <CastPolicy.FP32: 'fp32'>)}
    """

    name: str
    ops: Mapping[str, Rule]
    default: CastPolicy | Literal["device"]
    framework: str
    repairs: bool
    parent: Policy | None = field(repr=False)
    _hash: int = field(repr=False)

    def __init__(
        self,
        name: str,
        ops: Mapping[str, RuleLike] | None = None,
        *,
        default: str | None = None,
        framework: str = "torch",
        repairs: bool | None = None,
        parent: Policy | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            msg = f"a policy's name comes first and must be a non-empty string, got {name!r}."
            raise PolicyError(msg)
        if ops is not None and not isinstance(ops, Mapping):
            msg = f"a policy's ops must be a mapping from op name to rule, got {type(ops).__name__}."
            raise PolicyError(msg)
        rules = resolve_rules(ops or {}, framework)
        mended = mends(repairs, framework)
        self._set(name, rules, default_rule(default, framework), framework, parent, repairs=mended)

    def _set(
        self,
        name: str,
        rules: dict[str, Rule],
        default: CastPolicy | Literal["device"],
        framework: str,
        parent: Policy | None,
        *,
        repairs: bool,
    ) -> None:
        content = (frozenset(rules.items()), default, framework, repairs)
        values: dict[str, Any] = {
            "name": name,
            "ops": MappingProxyType(dict(sorted(rules.items()))),
            "default": default,
            "framework": framework,
            "repairs": repairs,
            "parent": parent,
            "_hash": hash(content),
        }
        for attribute, value in values.items():
            object.__setattr__(self, attribute, value)

    @classmethod
    def from_table(cls, device: str, *, framework: str = "torch") -> Policy:
        """Give the table that the framework itself applies on a device, as a policy without repairs.

        Args:
            device: A name from `mezzo.tables.devices`, such as ``"cuda"`` or ``"reference"``.
            framework: Whose table.

        Returns:
            A policy named ``"torch/cuda"``.

        Raises:
            DeviceError: There is no table for the device; for hpu, xla and ipu the message says who ships it.

        Example:
            >>> Policy.from_table("cpu").rule("conv2d")
            <CastPolicy.LOWER_PRECISION_FP: 'lower_precision_fp'>
        """
        policy = object.__new__(cls)
        rules = device_rules(device, framework)
        policy._set(f"{framework}/{device}", rules, default_rule(None, framework), framework, None, repairs=False)
        return policy

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """Read a policy from a TOML file.

        Args:
            path: The file. Its keys are ``name``, ``framework``, ``base`` (the policy to start from), ``default`` and the
                table ``ops``; see `save`.

        Returns:
            The policy.

        Raises:
            PolicyFileError: The file is not valid TOML or has a wrong key or value.
            UnknownOpError: It names an op that does not exist.
            FileNotFoundError: There is no such file.

        Example:
            >>> import tempfile, pathlib
            >>> path = pathlib.Path(tempfile.mkdtemp(), "mine.toml")
            >>> Policy("mine", {"mm": "fp32"}).save(path)
            >>> Policy.load(path) == Policy("mine", {"mm": "fp32"})
            True
        """
        from .policy_file import read_policy  # noqa: PLC0415 - it imports this module

        return read_policy(Path(path))

    def save(self, path: str | Path) -> None:
        """Write the policy as a TOML file that `load` reads back to an equal policy.

        Args:
            path: Where to write; an existing file is replaced.
        """
        from .policy_file import write_policy  # noqa: PLC0415 - it imports this module

        write_policy(self, Path(path))

    def override(self, rules: Mapping[str, RuleLike], *, name: str | None = None) -> Policy:
        """Return a policy with some rules replaced or added.

        Args:
            rules: Op names to rules, as in the constructor.
            name: The new policy's label; by default this one's with a plus sign.

        Returns:
            A new policy.

        Raises:
            UnknownOpError: A name is no op; near names are offered.
            PolicyError: A rule cannot be applied.

        Example:
            >>> Policy.from_table("cuda").override({"softmax": "fallthrough"}).name
            'torch/cuda+'
        """
        if not isinstance(rules, Mapping):
            msg = f"override() takes a mapping from op name to rule, got {type(rules).__name__}."
            raise PolicyError(msg)
        if name is not None and (not isinstance(name, str) or not name):
            msg = f"a policy's name must be a non-empty string, got {name!r}."
            raise PolicyError(msg)
        policy = object.__new__(type(self))
        merged = {**self.ops, **resolve_rules(rules, self.framework)}
        policy._set(
            name or f"{self.name.rstrip('+')}+", merged, self.default, self.framework, self, repairs=self.repairs
        )
        return policy

    def on(self, device: str) -> Policy:
        """Fill in the device's own table where the policy leaves it to the device.

        Args:
            device: A name from `mezzo.tables.devices`.

        Returns:
            This policy if its default is not ``"device"``; else one that lists every rule in force on that device.

        Raises:
            DeviceError: There is no table for the device.

        Example:
            >>> Policy("keep", {"mm": "fp32"}, default="device").on("cpu").rule("linear")
            <CastPolicy.LOWER_PRECISION_FP: 'lower_precision_fp'>
        """
        tables.device_table(device, self.framework)
        if self.default != DEVICE:
            return self
        table = Policy.from_table(device, framework=self.framework)
        policy = object.__new__(type(self))
        rules = {**table.ops, **self.ops}
        policy._set(self.name, rules, CastPolicy.FALLTHROUGH, self.framework, table, repairs=self.repairs)
        return policy

    def rule(self, op: str, low_dtype: object = "bfloat16") -> CastPolicy:
        """Look up the rule of one op.

        Args:
            op: A name that stands for ops with one and the same rule.
            low_dtype: The region's dtype, ``"bfloat16"`` or ``"float16"``, or a framework's dtype of that name, such as
                ``torch.float16``.

        Returns:
            The cast policy; for an op that is not listed, the policy's default.

        Raises:
            UnknownOpError: The name is no op.
            PolicyError: The name covers ops with different rules, or the default is left to the device; ask `on` first.

        Example:
            >>> Policy.from_table("cuda").rule("gelu")
            <CastPolicy.FALLTHROUGH: 'fallthrough'>
        """
        dtype = low_name(low_dtype)
        found = {name: self.rule_of(name, dtype) for name in vocabulary(self.framework).resolve(op)}
        kinds = set(found.values())
        if len(kinds) > 1:
            listed = ", ".join(f"{name}: {rule}" for name, rule in found.items())
            msg = f"{op!r} covers ops with different rules in {self.name!r}; name one of them ({listed})."
            raise PolicyError(msg)
        rule = kinds.pop()
        if rule == DEVICE:
            msg = f"{self.name!r} leaves {op!r} to the device's own table; ask policy.on(device).rule({op!r})."
            raise PolicyError(msg)
        return CastPolicy(rule)

    def rule_of(self, canonical: str, low_dtype: str) -> CastPolicy | Literal["device"]:
        """Look up a rule by canonical name, without resolving names; what the adapters use."""
        rule = self.ops.get(canonical)
        if rule is None:
            return self._unlisted(canonical)
        if isinstance(rule, ByDtype):
            return rule.float16 if low_dtype == "float16" else rule.bfloat16
        return rule

    def _unlisted(self, canonical: str) -> CastPolicy | Literal["device"]:
        if self.framework == "jax":
            return self._unlisted_primitive(canonical)
        if self.default in (DEVICE, CastPolicy.FALLTHROUGH):
            return self.default
        traits = vocabulary(self.framework).traits.get(canonical, frozenset())
        return self.default if "compute" in traits else CastPolicy.FALLTHROUGH

    def _unlisted_primitive(self, canonical: str) -> CastPolicy | Literal["device"]:
        """Give the default to primitives that compute; what others do to dtypes is not a matter of taste.

        A `reshape` has to follow its operand and a `concatenate` has to unite its operands, or the primitives that are
        listed would be of no use. Of a primitive that nobody knows it is not known either whether it takes other dtypes.
        """
        traits = vocabulary("jax").traits.get(canonical)
        if traits is not None and "compute" in traits:
            return self.default
        return tables.device_table("xla", "jax").get(canonical, CastPolicy.OPAQUE)

    def diff(self, other: Policy) -> dict[str, tuple[Rule | str | None, Rule | str | None]]:
        """Compare two policies op by op.

        Args:
            other: The policy to compare with.

        Returns:
            Canonical op name to (this policy's rule, the other's); None where a policy does not list the op. Different
            defaults stand under ``"default"``, different repairs under ``"repairs"`` as ``"on"`` and ``"off"``. Empty
            exactly if the policies are equal.

        Raises:
            PolicyError: ``other`` is not a policy.
        """
        if not isinstance(other, Policy):
            msg = f"diff() takes a Policy, got {other!r}; builtin_policy(name) gives a built-in one."
            raise PolicyError(msg)
        names = sorted(set(self.ops) | set(other.ops))
        pairs: dict[str, tuple[Rule | str | None, Rule | str | None]] = {
            name: (self.ops.get(name), other.ops.get(name)) for name in names
        }
        changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if self.default != other.default:
            changed["default"] = (self.default, other.default)
        if self.repairs != other.repairs:
            changed["repairs"] = (_SWITCH[self.repairs], _SWITCH[other.repairs])
        return changed

    def explain(self, op: str, *, device: str | None = None) -> Explanation:
        """Say what happens to an op, and why.

        Args:
            op: A name as `mezzo.vocabulary.Vocabulary.resolve` understands it.
            device: Fill in this device's own table first; needed where the policy leaves the op to the device.

        Returns:
            An `mezzo.explanation.Explanation`: data, and readable text when printed.

        Raises:
            UnknownOpError: The name is no op.

        Example:
            >>> print(Policy.from_table("cuda").explain("softmax"))  # doctest: +ELLIPSIS
            softmax under 'torch/cuda'
            aten::softmax.int: fp32_set_opt_dtype
              from the table 'torch/cuda'
            ...
        """
        return explain(self, op, device)

    def origin(self, canonical: str) -> str:
        """Name where the rule of an op was set: a table, a policy, or the default."""
        if canonical not in self.ops:
            if self.framework == "jax" and "compute" not in vocabulary("jax").traits.get(canonical, frozenset()):
                return "the table 'jax/xla': it does not compute, so that a policy's default does not cover it"
            return f"the default of {self.name!r} for ops it does not list"
        policy = self
        while policy.parent is not None and policy.parent.ops.get(canonical) == self.ops[canonical]:
            policy = policy.parent
        kind = "the table" if policy.parent is None and policy.name.startswith(f"{self.framework}/") else "the policy"
        return f"{kind} {policy.name!r}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Policy):
            return NotImplemented
        mine = (self._hash, self.default, self.framework, self.repairs, self.ops)
        return mine == (other._hash, other.default, other.framework, other.repairs, other.ops)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.name, dict(self.ops), str(self.default), self.framework, self.parent, self.repairs)

    def __repr__(self) -> str:
        described = f"{len(self.ops)} ops, default={str(self.default)!r}, framework={self.framework!r}"
        return f"Policy({self.name!r}, {described}{'' if self.repairs else ', repairs=False'})"


def _rebuild(
    name: str,
    rules: dict[str, Rule],
    default: str,
    framework: str,
    parent: Policy | None,
    repairs: bool = True,  # noqa: FBT001, FBT002 - pickle calls by position
) -> Policy:
    policy = object.__new__(Policy)
    policy._set(name, rules, default_rule(default, framework), framework, parent, repairs=repairs)
    return policy


_SWITCH = {True: "on", False: "off"}
