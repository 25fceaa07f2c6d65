"""The small language: frozen values that print as a program."""

from __future__ import annotations

from dataclasses import dataclass, field

from mezzo import Policy, builtin_policy

__all__ = [
    "Backward",
    "Block",
    "Call",
    "ClearCache",
    "Generator",
    "Grad",
    "KeepCasts",
    "PolicyChoice",
    "Program",
    "Raise",
    "Region",
    "Statement",
    "Stop",
    "Thread",
    "Try",
    "Update",
    "statements_of",
]


class Stop(Exception):  # noqa: N818 - it is no error
    """What `Raise` raises."""


@dataclass(frozen=True)
class PolicyChoice:
    """A policy, as a program names it.

    Attributes:
        base: A built-in policy that is overridden, or ``"everything"`` for a policy of which only the default is given.
        rules: Canonical op name to rule.
        default: The default of ``"everything"``.
    """

    base: str
    rules: tuple[tuple[str, str], ...] = ()
    default: str = "device"

    def policy(self) -> Policy:
        if self.base == "everything":
            return Policy("everything", dict(self.rules), default=self.default)
        found = builtin_policy(self.base)
        return found.override(dict(self.rules)) if self.rules else found

    def __str__(self) -> str:
        if self.base == "everything":
            return f"Policy('everything', {dict(self.rules)}, default={self.default!r})"
        return f"builtin_policy({self.base!r}).override({dict(self.rules)})" if self.rules else repr(self.base)


@dataclass(frozen=True)
class Region:
    """A region around a block, or the decorator of a function with it.

    Attributes:
        kind: ``"mezzo"`` or ``"torch"``.
        how: ``"with"``, ``"decorated"``, or ``"recursive"``: a decorated function that calls itself once.
    """

    body: Block = ()
    kind: str = "mezzo"
    how: str = "with"
    dtype: str | None = None
    enabled: bool = True
    cache_enabled: bool | None = None
    policy: PolicyChoice | None = None

    @property
    def header(self) -> str:
        given = {"dtype": self.dtype, "cache_enabled": self.cache_enabled, "policy": self.policy}
        options = "".join(f", {name}={value}" for name, value in given.items() if value is not None)
        return f"{self.kind}.autocast('cpu'{'' if self.enabled else ', enabled=False'}{options})"

    def lines(self) -> list[str]:
        if self.how == "with":
            return [f"with {self.header}:", *_indented(self.body)]
        again = ["    if depth: run(depth - 1)"] if self.how == "recursive" else []
        start = 1 if self.how == "recursive" else 0
        return [f"@{self.header}", "def run(depth):", *_indented(self.body), *again, f"run({start})"]


@dataclass(frozen=True)
class Generator:
    """A decorated generator function, and the loop that consumes it.

    Attributes:
        region: What decorates it.
        steps: What it runs before each ``yield``.
        between: What the loop runs after each.
        around: The region in which the loop is, if any.
    """

    region: Region
    steps: tuple[Block, ...]
    between: Block = ()
    around: Region | None = None

    def lines(self) -> list[str]:
        inside = [line for step in self.steps for line in (*_indented(step), "    yield")]
        loop = ["for _ in steps():", *_indented(self.between)]
        if self.around is not None:
            loop = [f"with {self.around.header}:", *(f"    {line}" for line in loop)]
        return [f"@{self.region.header}", "def steps():", *inside, *loop]


@dataclass(frozen=True)
class Thread:
    """A block that runs in a new thread, bound to the state of this one or not."""

    body: Block
    bound: bool = False

    def lines(self) -> list[str]:
        return [f"in a new thread{', bound' if self.bound else ''}:", *_indented(self.body)]


@dataclass(frozen=True)
class Grad:
    """A block in another grad mode: ``"no_grad"``, ``"inference_mode"``, ``"enable_grad"``."""

    mode: str
    body: Block

    def lines(self) -> list[str]:
        return [f"with torch.{self.mode}():", *_indented(self.body)]


@dataclass(frozen=True)
class KeepCasts:
    """A block in which casts live across regions."""

    body: Block

    def lines(self) -> list[str]:
        return ["with mezzo.torch.keep_casts():", *_indented(self.body)]


@dataclass(frozen=True)
class Try:
    """A block out of which no `Stop` comes."""

    body: Block

    def lines(self) -> list[str]:
        return ["try:", *_indented(self.body), "except Stop: pass"]


@dataclass(frozen=True)
class Raise:
    """The end of the block around, up to a `Try`."""

    def lines(self) -> list[str]:
        return ["raise Stop"]


@dataclass(frozen=True)
class Call:
    """A call of an op. What it gives is put into a register; if it raises, that is noted and the program goes on.

    Attributes:
        op: A name in `OPERATIONS`.
        args: Names of registers and weights, None for what is left out.
        target: The register.
    """

    op: str
    args: tuple[str | None, ...]
    target: str

    def lines(self) -> list[str]:
        return [f"{self.target} = {self.op}({', '.join(map(str, self.args))})"]


@dataclass(frozen=True)
class Backward:
    """A backward pass from a register; the gradients of the weights are noted and dropped."""

    register: str

    def lines(self) -> list[str]:
        return [f"backward({self.register})"]


@dataclass(frozen=True)
class Update:
    """A change of a weight; see `changing`."""

    how: str
    weight: str

    def lines(self) -> list[str]:
        return [f"update({self.weight}, {self.how!r})"]


@dataclass(frozen=True)
class ClearCache:
    """``torch.clear_autocast_cache()``."""

    def lines(self) -> list[str]:
        return ["torch.clear_autocast_cache()"]


Statement = Region | Generator | Thread | Grad | KeepCasts | Try | Raise | Call | Backward | Update | ClearCache
Block = tuple[Statement, ...]


@dataclass(frozen=True, repr=False)
class Program:
    """A program; prints as one.

    Attributes:
        body: Its statements.
        default_policy: What `mezzo.torch.set_default_policy` is called with before it.
    """

    body: Block
    default_policy: PolicyChoice | None = field(default=None)

    def __str__(self) -> str:
        first = [] if self.default_policy is None else [f"set_default_policy({self.default_policy})"]
        return "\n".join([*first, *(line for statement in self.body for line in statement.lines())])

    __repr__ = __str__


def statements_of(block: Block) -> list[Statement]:
    """List all statements in a block, inner ones too."""
    found: list[Statement] = []
    for statement in block:
        found.append(statement)
        inner: tuple[Block, ...] = ()
        if isinstance(statement, Generator):
            inner = (*statement.steps, statement.between)
        elif isinstance(statement, Region | Thread | Grad | KeepCasts | Try):
            inner = (statement.body,)
        found += [one for part in inner for one in statements_of(part)]
    return found


def _indented(block: Block) -> list[str]:
    return [f"    {line}" for statement in block for line in statement.lines()] or ["    pass"]
