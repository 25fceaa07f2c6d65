"""Importing the adapter for JAX is harmless, and using it leaves JAX as it was."""

from __future__ import annotations

from .test_isolation import run

# Each attribute of the places where a patch could be, and the rules of each primitive.
BEFORE_AND_AFTER = """
import json, sys
import jax, jax.extend, jax.lax, jax.nn, jax.numpy, jax.tree_util
import jax._src.core as core, jax._src.xla_bridge as xla_bridge
from jax._src.interpreters import ad, batching, mlir, partial_eval

PLACES = [jax, jax.lax, jax.numpy, jax.nn, jax.random, jax.tree_util, jax.dtypes, jax.extend.core, jax.Array, core,
          core.ShapedArray, core.Jaxpr, core.JaxprEqn, core.Primitive, core.Tracer, core.Trace, ad, batching, partial_eval]
RULES = {"jvp": ad.primitive_jvps, "transpose": ad.primitive_transposes, "batching": batching.fancy_primitive_batchers,
         "lowering": mlir._lowerings}

def snapshot():
    attributes = [dict(vars(place)) for place in PLACES]
    return attributes, {name: dict(rules) for name, rules in RULES.items()}

# JAX itself imports some of its parts when they are first asked for, and counts what it does.
def by_itself(value):
    return isinstance(value, (int, type(sys)))

def changes(before, after):
    found = [f"{place.__name__}.{name}" for place, old, new in zip(PLACES, before[0], after[0])
             for name in {**old, **new} if old.get(name) is not new.get(name) and not by_itself(new.get(name))]
    found += [name for name in RULES if any(after[1].get(name, {}).get(key) is not rule
                                            for key, rule in before[1][name].items())]
    return sorted(found)
"""


def test_importing_the_adapter_imports_no_other_framework_and_no_library_on_top_of_jax() -> None:
    loaded = run("import json, sys, mezzo.jax; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))")
    assert {"mezzo", "jax"} <= set(loaded)
    assert not set(loaded) & {"torch", "tensorplay", "flax", "optax", "equinox", "jmp", "typer", "rich", "click"}


def test_importing_the_adapter_changes_nothing_in_jax_and_asks_no_device() -> None:
    code = """
before = snapshot()
import mezzo.jax
after = snapshot()
print(json.dumps([changes(before, after), xla_bridge.backends_are_initialized()]))
"""
    assert run(BEFORE_AND_AFTER + code) == [[], False]


def test_transforming_a_function_asks_no_device() -> None:
    code = """
import mezzo.jax
mezzo.jax.autocast(lambda x: x @ x, dtype="float16", policy="unified")
mezzo.jax.disabled()
print(json.dumps(xla_bridge.backends_are_initialized()))
"""
    assert run(BEFORE_AND_AFTER + code) is False


def test_a_transformed_function_leaves_jax_as_it_was() -> None:
    code = """
import mezzo.jax
x = jax.numpy.ones((2, 2))

def loss(x):
    with mezzo.jax.disabled():
        kept = x @ x
    return jax.nn.relu(x @ x + kept).sum()

jax.jit(jax.grad(loss))(x)
before = snapshot()
step = jax.jit(jax.grad(mezzo.jax.autocast(loss)))
converts = str(jax.make_jaxpr(step)(x)).count("bf16")
step(x)
mezzo.jax.autocast(loss)(x)
print(json.dumps([converts > 0, changes(before, snapshot())]))
"""
    assert run(BEFORE_AND_AFTER + code) == [True, []]


def test_a_patch_would_be_seen() -> None:
    code = """
before = snapshot()
jax.numpy.dot = lambda *arguments: None
jax.lax.mine = jax.numpy.dot
ad.primitive_jvps[jax.lax.dot_general_p] = jax.numpy.dot
print(json.dumps(changes(before, snapshot())))
"""
    assert run(BEFORE_AND_AFTER + code) == ["jax.lax.mine", "jax.numpy.dot", "jvp"]
