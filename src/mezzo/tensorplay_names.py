"""The names of TensorPlay's ops, and what a user may write for them.

A policy stores the names that ops have in TensorPlay's own dispatcher, without overloads (``sum``, not
``sum.dim_IntList``): a call is seen where it enters TensorPlay, before an overload is chosen. People write what they call:
``F.softmax``, ``tensorplay.matmul``, ``Tensor.exp``, ``__matmul__``, ``nn.Linear``.

Not every function enters the op of its own name: `tensorplay.nn.functional.kl_div` enters ``tp_kl_div``. So a name on its
own is the op of that name and what the function of that name enters; ``_C.`` in front means the op alone, and another
module in front what that function enters. `tensorplay.nn.functional.bilinear` is composed in Python of ``matmul`` and
others, and is taken for the op of that name. A rule for a composition that has no op of its name is an error that says
which ops it is composed of, since their rules decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .errors import UnknownOpError, near
from .vocabulary import Alias, Vocabulary

__all__ = ["TensorPlayNames"]

_PACKAGE = r"(tensorplay|tp)\."

# Where a function stands, as the names of aliases write it, and what its op's name starts with.
_MODULES = {
    rf"({_PACKAGE})?nn\.functional\.|F\.": ("F.", ""),
    rf"({_PACKAGE})?linalg\.": ("linalg.", "linalg_"),
    rf"({_PACKAGE})?fft\.": ("fft.", "fft_"),
    rf"({_PACKAGE})?special\.": ("special.", ""),
    rf"({_PACKAGE})?nn\.(modules\.\w+\.)?": ("nn.", ""),
    rf"({_PACKAGE})?Tensor\.": ("Tensor.", ""),
    rf"{_PACKAGE}(functional\.)?": ("tensorplay.", ""),
}
_EXACT = re.compile(rf"({_PACKAGE})?_C\.")


@dataclass
class TensorPlayNames(Vocabulary):
    """The ops of TensorPlay and the names that stand for them.

    Attributes:
        traits: Op to its traits: ``compute`` (a function of its tensors, which a policy's default may cover), ``mutates``
            (writes into an argument), ``dtype`` (has an optional dtype argument).
        aliases: Other names, with a module in front (``F.kl_div``) where the op of the name alone is another one; an entry
            without ops is a composition in Python.
        namespace: Empty; these ops have none.
    """

    namespace: str = ""

    def resolve(self, name: str) -> tuple[str, ...]:
        """Find the ops that a name stands for.

        Args:
            name: What a user wrote. With ``tensorplay._C.`` or ``_C.`` in front it is that op and no other.

        Returns:
            Names of ops, in a fixed order.

        Raises:
            UnknownOpError: No op has this name; near names are offered, and those of which a composition consists.

        Example:
            >>> from mezzo.vocabulary import vocabulary
            >>> vocabulary("tensorplay").resolve("F.softmax"), vocabulary("tensorplay").resolve("kl_div")
            (('softmax',), ('kl_div', 'tp_kl_div'))
        """
        if not isinstance(name, str):
            msg = f"op names are strings such as 'softmax', got {name!r}."
            raise UnknownOpError(msg)
        if _EXACT.match(name) and (exact := _EXACT.sub("", name, count=1)) in self.traits:
            return (exact,)
        if found := self.own(name):
            return found
        if inside := self.inside(name):
            msg = f"{name!r} is no op of TensorPlay: it is composed of {', '.join(inside)}. Name those that you mean."
            raise UnknownOpError(msg)
        _, prefix, rest = _split(name)
        raise UnknownOpError(self._unknown(name, prefix + rest))

    def inside(self, name: str) -> tuple[str, ...]:
        """Find the ops that the function or module of a name enters instead of an op of that name.

        Args:
            name: What a user wrote, such as ``"nn.LSTM"`` or ``"cross_entropy"``. An op's own name is looked up as a
                function's, too: ``"bilinear"`` is an op, and `tensorplay.nn.functional.bilinear` is composed of others.

        Returns:
            Names of ops; empty if the function of that name enters the op of that name.
        """
        if name in self.traits:
            found = self._function_of(name)
            return tuple(op for op in found.inside if op != name) if found else ()
        alias = next(self._aliases_of(name), None)
        return alias.inside if alias else ()

    def base_names(self) -> Iterable[str]:
        """Give every op's name and every alias, without modules."""
        yield from self.traits
        yield from (alias.rpartition(".")[2] for alias in self.aliases)

    def covers(self, base: str) -> tuple[str, ...]:
        """Give the op of this name, and those that the function of this name enters instead."""
        if base not in self.traits:
            return ()
        found = self._function_of(base)
        return (base, *(op for op in found.ops if op != base)) if found else (base,)

    def own(self, name: str) -> tuple[str, ...]:
        """Give the ops that a rule for a name is for; none for a composition that has no op of its name."""
        return self.covers(name) or self._found(name)

    def alone(self, op: str) -> str:
        """Spell an op's name so that it covers no other."""
        return f"_C.{op}" if len(self.covers(op)) > 1 else op

    def _function_of(self, op: str) -> Alias | None:
        spellings = (f"F.{op}", f"tensorplay.{op}", re.sub("^(linalg|fft|special)_", r"\1.", op))
        return next((self.aliases[key] for key in spellings if key in self.aliases), None)

    def _found(self, name: str) -> tuple[str, ...]:
        module, prefix, rest = _split(name)
        if alias := next(self._aliases_of(name), None):
            own = prefix + rest
            return alias.ops or ((own,) if module and own in self.traits else ())
        # tensorplay.special.expm1 enters expm1, and where there is no such op, as for the Bessel functions, special_<name>.
        plain = (prefix + rest, f"special_{rest}") if module == "special." else (prefix + rest,)
        return next((found for op in plain if (found := self.covers(op))), ())

    def _aliases_of(self, name: str) -> Iterator[Alias]:
        module, prefix, rest = _split(name)
        keys = (name, module + rest) if prefix else (name, module + rest, rest)
        yield from (self.aliases[key] for key in keys if key in self.aliases)

    def _unknown(self, name: str, plain: str) -> str:
        named = plain.rpartition("::")[2]
        base = named.split(".")[0]
        if "::" in name:
            hint = f" Did you mean {base!r}?" if base in self.traits else ""
            return f"{name!r} is no op that a policy for TensorPlay names: these names have no namespace.{hint}"
        if "." in named and base in self.traits:
            return f"{name!r} is no op of TensorPlay, whose ops are named without overloads. Did you mean {base!r}?"
        hint = near(named.rpartition(".")[2], set(self.base_names()))
        return (
            f"{name!r} is no op of TensorPlay.{hint} `mezzo ops --framework tensorplay` lists the ops that have rules."
        )


def _split(name: str) -> tuple[str, str, str]:
    """Split a spelling into its module, as aliases write it, what an op's name starts with there, and the rest."""
    for pattern, (module, prefix) in _MODULES.items():
        if match := re.match(pattern, name):
            return module, prefix, name[match.end() :]
    return "", "", name
