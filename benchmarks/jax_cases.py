"""What is measured of `mezzo.jax`, in which ways and how much: data that needs no framework."""

from __future__ import annotations

from dataclasses import dataclass

# Against bfloat16 written by hand. "Not above" for errors: the fourth digit is decided by the order of sums.
RUN_BOUND = 1.05
BUILD_BOUND = 1.1
ERROR_BOUND = 1.005

HAND, CONTROL, MEZZO, AROUND = "hand", "control", "mezzo", "mezzo-around"

# In the order of a round: the two of mezzo next to what they are held against.
TITLES = {
    "float32": "float32",
    MEZZO: "mezzo: value_and_grad(autocast(f))",
    HAND: "bfloat16 by hand",
    AROUND: "mezzo: autocast(value_and_grad(f))",
    CONTROL: "bfloat16 by hand, again (control)",
    "jmp": "jmp, inputs cast",
    "jmp-norms": "jmp, norms that return float32",
    "mpx": "mpx, filter_value_and_grad",
    "jaxamp": "jaxamp, amp",
    "grampax": "grampax, autocast",
}
# Those with bounds, and those that are compiled more than once for it.
BOUNDED = (MEZZO, AROUND)
COMPILED = (MEZZO, HAND, AROUND, CONTROL)


@dataclass(frozen=True)
class JaxCase:
    """A part of the page: one model, measured in every way.

    Attributes:
        name: What ``--case`` selects.
        title: What the tables are headed by.
        model: Of `benchmarks.jax_models`.
    """

    name: str
    title: str
    model: str


JAX_CASES = (
    JaxCase("jax-mlp", "MLP of 4 layers, 512 to 1024 to 512 and so on, 512 rows", "mlp"),
    JaxCase("jax-transformer", "Transformer of 4 layers, d=256, (8, 128), layers written out", "transformer"),
    JaxCase("jax-scan", "Transformer of 4 layers, d=256, (8, 128), scan over layers", "scan"),
    JaxCase("jax-call", "A call of a small loss: two layers of 8, 4 rows, forward only", "call"),
)


@dataclass(frozen=True)
class JaxPlan:
    """How much one process measures.

    Attributes:
        rounds: Measured rounds, where the work is short.
        least_rounds: Measured rounds, however long the work takes.
        budget: Seconds that the rounds may take, beyond the least.
        warmup: Rounds before them that are thrown away.
        seconds: What one way's turn should take, at least one iteration.
        builds: How often each of `COMPILED` is compiled.
        seeds: On how many parameters and data gradients are compared with float32's.
        everything: Whether all ways are measured, or `COMPILED` alone.
        clock: "wall" or "cpu".
    """

    rounds: int
    least_rounds: int
    budget: float
    warmup: int
    seconds: float
    builds: int
    seeds: int
    everything: bool
    clock: str
