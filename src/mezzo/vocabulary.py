"""Op names: what a user may write, and which ops of the framework it stands for.

A policy stores canonical names (``aten::softmax.int``). People write what they know: ``softmax``, ``F.softmax``,
``torch.ops.aten.softmax.int``, ``__matmul__``, ``GRUCell``. The catalog that decides is data, so names can be checked
where the framework is not installed; an adapter teaches it ops that are newer than the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from . import tables
from .errors import UnknownOpError, near

__all__ = ["Alias", "Vocabulary", "vocabulary"]

# Python namespaces and the prefix that the op's name carries instead.
_NAMESPACES = {
    r"(torch\.)?ops\.aten\.": "",
    r"aten\.": "",
    r"(torch\.)?linalg\.": "linalg_",
    r"(torch\.)?fft\.": "fft_",
    r"(torch\.)?special\.": "special_",
    r"(torch\.)?nn\.functional\.": "",
    r"F\.": "",
    r"(torch\.)?nn\.": "",
    r"(torch\.)?Tensor\.": "",
    r"torch\.": "",
}


@dataclass(frozen=True)
class Alias:
    """A Python name whose ops are called otherwise.

    Attributes:
        ops: The op names that the call reaches first, without namespace.
        inside: The ops that these call in turn where they are not listed themselves.
    """

    ops: tuple[str, ...]
    inside: tuple[str, ...]


@dataclass
class Vocabulary:
    """The op names of one framework.

    Attributes:
        traits: Canonical op name to its traits: ``out`` (an ``out=`` overload), ``mutates`` (writes into an argument),
            ``dtype`` (has an optional dtype argument), ``compute`` (a function of its tensors, which a policy's default
            may cover).
        aliases: Python names for ops.
        namespace: The prefix of canonical names, ``"aten::"`` for PyTorch; the others have none.
    """

    traits: dict[str, frozenset[str]]
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    namespace: str = "aten::"
    _overloads: dict[str, list[str]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Index the overloads by the op they belong to."""
        for op in self.traits:
            self._overloads.setdefault(base_name(op), []).append(op)

    def learn(self, traits: Mapping[str, frozenset[str]]) -> None:
        """Add ops that the data does not have, such as those of a newer release.

        Args:
            traits: Canonical names and their traits; names that are known already keep the traits they have.
        """
        for op, found in traits.items():
            if op not in self.traits:
                self.traits[op] = found
                self._overloads.setdefault(base_name(op), []).append(op)

    def resolve(self, name: str) -> tuple[str, ...]:
        """Find the ops that a name stands for.

        A name without an overload covers all overloads of the op but ``out``. A name from another namespace
        (``mylib::op``) is taken as it is: custom ops are known to the framework only.

        Args:
            name: What a user wrote.

        Returns:
            Canonical op names, in a fixed order.

        Raises:
            UnknownOpError: No op has this name; near names are offered.

        Example:
            >>> vocabulary("torch").resolve("F.softmin")
            ('aten::softmax.int',)
        """
        if not isinstance(name, str):
            msg = f"op names are strings such as 'softmax', got {name!r}."
            raise UnknownOpError(msg)
        if "::" in name and not name.startswith(self.namespace):
            namespace, _, rest = name.partition("::")
            if near(namespace, [self.namespace.removesuffix("::")]) and self._expand(rest):
                msg = f"{name!r} is no op. Did you mean {self.namespace + rest!r}?"
                raise UnknownOpError(msg)
            if not namespace or not re.fullmatch(r"\w+(\.\w+)?", rest):
                msg = f"{name!r} is no op; a custom op is written as library::op or library::op.overload."
                raise UnknownOpError(msg)
            return (name.removesuffix(".default"),)
        plain = name.removeprefix(self.namespace)
        if plain == name:
            plain = self._without_namespace(name)
            if plain in self.aliases:
                found = [op for target in self.aliases[plain].ops for op in self._expand(target)]
                return tuple(dict.fromkeys(found))
        found = self._expand(plain)
        if not found:
            raise UnknownOpError(self._unknown(name, plain))
        return tuple(found)

    def inside(self, name: str) -> tuple[str, ...]:
        """Find the ops that a call reaches through others, for the names where that matters.

        Args:
            name: What a user wrote, such as ``"cross_entropy"``.

        Returns:
            Canonical op names; empty for most names.
        """
        alias = self.aliases.get(self._without_namespace(name))
        return tuple(op for target in alias.inside for op in self._expand(target)) if alias else ()

    def base_names(self) -> Iterable[str]:
        """Give every op name without namespace and overload, and every alias."""
        yield from (base.removeprefix(self.namespace) for base in self._overloads)
        yield from self.aliases

    def covers(self, base: str) -> tuple[str, ...]:
        """Give the overloads that a base name covers: all of them but ``out``."""
        return tuple(sorted(op for op in self._overloads.get(base, ()) if "out" not in self.traits[op]))

    def own(self, name: str) -> tuple[str, ...]:
        """Give the ops that a rule for a name is for."""
        return self.resolve(name)

    def alone(self, op: str) -> str:
        """Spell an op's name so that it covers no other overload."""
        return op if "." in op else f"{op}.default"

    def _expand(self, plain: str) -> list[str]:
        op = self.namespace + plain
        if "." in plain:
            exact = op.removesuffix(".default")
            return [exact] if exact in self.traits else []
        return list(self.covers(op)) or self._overloads.get(op, [])

    def _without_namespace(self, name: str) -> str:
        for pattern, prefix in self._namespaces().items():
            if match := re.match(pattern, name):
                return prefix + name[match.end() :]
        return name

    def _namespaces(self) -> Mapping[str, str]:
        return _NAMESPACES

    def _unknown(self, name: str, plain: str) -> str:
        base = self.namespace + plain.split(".")[0]
        if base in self._overloads:
            listed = ", ".join(sorted(op.removeprefix(self.namespace) for op in self._overloads[base]))
            return f"{name!r} is no op: {base} has no such overload; it has {listed}."
        hint = near(plain.split(".")[0], set(self.base_names()))
        return f"{name!r} is no op that this framework has.{hint} `mezzo ops` lists the ops that have rules."


def base_name(op: str) -> str:
    """Give an op's name without its overload.

    Example:
        >>> base_name("aten::sum.dim_IntList")
        'aten::sum'
    """
    return op.split(".", 1)[0]


@cache
def vocabulary(framework: str = "torch") -> Vocabulary:
    """Load the op names of a framework; once per process, since an adapter teaches it more of them.

    Args:
        framework: A name from `mezzo.tables.frameworks`.

    Returns:
        The framework's `Vocabulary`.

    Raises:
        PolicyError: There are no tables for this framework.

    Example:
        >>> vocabulary("torch").resolve("bmm.default")
        ('aten::bmm',)
    """
    tables.devices(framework)
    traits = {row["op"]: frozenset(row["traits"].split()) for row in tables.read(framework, "ops")}
    aliases = {
        row["name"]: Alias(tuple(row["ops"].split()), tuple(row["inside"].split()))
        for row in tables.read(framework, "aliases")
    }
    if framework == "jax":
        from .primitive_names import PrimitiveNames  # noqa: PLC0415 - it imports this module

        return PrimitiveNames(traits, aliases)
    if framework == "tensorplay":
        from .tensorplay_names import TensorPlayNames  # noqa: PLC0415 - it imports this module

        return TensorPlayNames(traits, aliases)
    return Vocabulary(traits, aliases)
