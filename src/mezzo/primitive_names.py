"""The names of JAX's primitives, and what a user may write for them.

A policy stores the names that JAX 0.10 gives its primitives (``dot_general``). People write what they call: ``lax.exp``,
``jnp.matmul``, ``jax.nn.sigmoid``, ``einsum``. Much of ``jax.numpy`` and ``jax.nn`` is composed of several primitives and
is traced as these; such a name stands for no primitive, and a rule for it says of which it is composed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .errors import UnknownOpError, near
from .vocabulary import Vocabulary

__all__ = ["PrimitiveNames"]

# What a spelling starts with, and what it keeps of that: jnp.max is no lax.max. The first that fits wins.
_NAMESPACES = {
    r"(jax\.)?lax\.(linalg\.|parallel\.)?": "",
    r"(jax\.numpy|jnp)\.(linalg|fft)\.": "",
    r"(jax\.numpy|jnp)\.": "jnp.",
    r"(jax\.)?nn\.": "",
    r"(jax\.scipy|jsp)\.(special|linalg)\.": "",
    r"jax\.random\.": "random_",
    r"jax\.(ops|ad_checkpoint)\.": "",
    r"jax\.": "",
}


@dataclass
class PrimitiveNames(Vocabulary):
    """The primitives of JAX and the names that stand for them.

    Attributes:
        traits: Primitive to its traits: ``compute`` (computes with floats, so that a policy's default may cover it),
            ``dot`` (a matrix product or convolution), ``moves`` (only moves or repeats elements), ``follows`` (the other
            operands take the dtype of the first), ``independent`` (operands need not agree in dtype), ``enters`` (runs
            other primitives, whose own rules decide, or is a cast that the function itself asks for), ``fixed`` (its
            parameters hold the dtypes with which it was traced, as those of a kernel or a callback do).
        aliases: Other names, with and without ``jnp.`` where both mean the same; an entry without ops is a composition.
        namespace: Empty; primitives have none.
    """

    namespace: str = ""

    def resolve(self, name: str) -> tuple[str, ...]:
        """Find the primitives that a name stands for.

        Args:
            name: What a user wrote.

        Returns:
            Names of primitives, in a fixed order.

        Raises:
            UnknownOpError: No primitive has this name; near names are offered, and those of which a composition consists.

        Example:
            >>> from mezzo.vocabulary import vocabulary
            >>> vocabulary("jax").resolve("jnp.matmul")
            ('dot_general',)
        """
        if not isinstance(name, str):
            msg = f"names of primitives are strings such as 'dot_general', got {name!r}."
            raise UnknownOpError(msg)
        if found := self._primitives(name):
            return found
        if inside := self.inside(name):
            rules = ", ".join(inside)
            msg = f"{name!r} is no primitive of JAX: it is traced as {rules}, and the rules of these decide. Name them."
            raise UnknownOpError(msg)
        raise UnknownOpError(self._unknown(name, self._plain(name)))

    def inside(self, name: str) -> tuple[str, ...]:
        """Find the primitives of which a function of JAX's is composed.

        Args:
            name: What a user wrote, such as ``"softmax"`` or ``"jnp.mean"``.

        Returns:
            Names of primitives; empty for a name that stands for primitives of its own.
        """
        return next((self.aliases[key].inside for key in self._keys(name) if key in self.aliases), ())

    def base_names(self) -> Iterable[str]:
        """Give every primitive's name and every alias, without namespaces."""
        yield from self.traits
        yield from (alias.removeprefix("jnp.") for alias in self.aliases)

    def covers(self, base: str) -> tuple[str, ...]:
        """Give the primitive of this name as a tuple; primitives have no overloads."""
        return (base,) if base in self.traits else ()

    def _primitives(self, name: str) -> tuple[str, ...]:
        for key in self._keys(name):
            if key in self.aliases:
                return self.aliases[key].ops
            if key in self.traits:
                return (key,)
        return ()

    def _keys(self, name: str) -> tuple[str, ...]:
        """Give what to look a name up by, the best first: ``jnp.max``, then ``max``; ``exp_p`` means ``exp``."""
        if name in self.traits:
            return (name,)
        spelled = self._without_namespace(name)
        plain = spelled.removeprefix("jnp.")
        return (spelled, plain, plain.removesuffix("_p"))

    def _plain(self, name: str) -> str:
        return self._without_namespace(name).removeprefix("jnp.")

    def _namespaces(self) -> Mapping[str, str]:
        return _NAMESPACES

    def _unknown(self, name: str, plain: str) -> str:
        if "::" in name:
            return f"{name!r} is no primitive of JAX: names with a namespace are PyTorch's."
        hint = near(plain, set(self.base_names()))
        return (
            f"{name!r} is no primitive of JAX.{hint} `mezzo ops --framework jax` lists them; one of your own is made known "
            "with mezzo.jax.register_primitive."
        )
