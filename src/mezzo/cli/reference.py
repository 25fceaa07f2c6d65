"""Write ``docs/op-reference.md`` from the tables: ``python -m mezzo.cli.reference docs/op-reference.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from mezzo import tables
from mezzo.builtin import builtin_policy
from mezzo.vocabulary import vocabulary

__all__ = ["reference"]

_HEAD = """# Op reference

Which op runs in which dtype, per device, as PyTorch 2.13 registers it and mezzo holds it as data. Generated from
`src/mezzo/tables/` by `make docs`; a test holds the two together, and another the tables and PyTorch.

* `lower`: every eligible input is cast to the region's dtype (`lower_precision_fp`).
* `fp32`: every eligible input is cast to float32.
* `set dtype`: no input is cast; the op is asked for a float32 result, unless a dtype was given (`fp32_set_opt_dtype`).
* `append dtype`: the overload with a dtype is called with float32 (`fp32_append_dtype`).
* `promote`: every eligible input is cast to the widest dtype among them.
* `banned`: the call raises.
* `banned if low`: the call raises if an input is in lower precision (`banned_lower_precision`).
* `own`: a kernel of PyTorch's that no rule describes: it casts to float16 and re-flattens the weights.
* `-`: not listed; the op runs in the dtypes that come in.

*reference* is the list that PyTorch's accelerator guide gives to authors of new backends; *unified* is mezzo's policy of
that name, the same on every device: the CUDA list, and the entries that only the CPU list has. mtia and maia have the same
list as xpu. The table for hpu is shipped by its vendor in Intel Gaudi's PyTorch plugin and is not part of PyTorch; xla's
ships with torch_xla.

What mezzo does with the primitives of JAX is [further below](#primitives-of-jax), and so are
[the ops of TensorPlay](#ops-of-tensorplay).

"""

_JAX_HEAD = """## Primitives of JAX

`mezzo.jax.autocast` gives every primitive a rule, the same on every device; JAX has no such table of its own. A test holds
the list against the installed JAX. The rules are for primitives whose float operands were traced as float32, bfloat16 or
float16; with others, such as float64 or complex, a primitive runs as it was traced.

* `lower`, `fp32` and `promote` are as above. A literal, and a bias or scale that is broadcast, adapts to what it meets, so
  that it does not promote; a product with a `precision=` of its own is left alone.
* `as is`: the primitive runs in the dtype that comes in (`fallthrough`).
* `opaque`: it runs in exactly the dtypes that were traced. So does every primitive that is not in the list.

A policy's default covers the primitives with the trait `compute`. `dot`: a matrix product or a convolution. `moves`: it only
moves or repeats elements. `follows`: its other float operands are cast to the dtype of the first. `independent`: its
operands need not agree. `enters`: it runs other primitives, whose own rules decide (`while` and `custom_vjp_call` only if
`autocast` is asked to), or is a cast that the function itself asks for. `fixed`: its parameters hold the dtypes with which
it was traced, so that it can be nothing but `opaque` or `banned`.

"""

_JAX_NAMES = """## Names of JAX's functions

These names stand for primitives that are called otherwise; `lax.`, `jax.nn.` and the like may stand before them. A function
without a primitive of its own is traced as those in the last column: a rule for it is an error, and `mezzo ops --framework
jax` shows the rules of these.

| name | primitive | traced as |
|---|---|---|
"""

_TENSORPLAY_HEAD = """## Ops of TensorPlay

Which op runs in which dtype under `mezzo.tensorplay.autocast`. Columns *cpu* and *cuda* are what TensorPlay 1.0 itself casts
on that device, *unified* is mezzo's policy of that name: PyTorch's unified table on TensorPlay's ops. The ops have their
names in TensorPlay's dispatcher, without overloads, and a call is cast where it enters TensorPlay.

* `lower`, `fp32`, `promote` and `banned` are as above; `-`: not listed, the op runs in the dtypes that come in.
* `*`: TensorPlay has no autocast kernel for the op, which is composed in C++ of ops that it would cast. mezzo casts nothing
  inside an op of C++, so the composition has the rule. Or the op is what the public function of a listed name enters.
* *repair* is what a policy with repairs does. `promote`: a call that fails over dtypes is made again with its inputs in the
  widest of their dtypes, else in float32. `promote first`: inputs of several float dtypes are cast to the widest of them
  beforehand, since its result or gradient would be wrong. `destination`: in place, the other inputs are cast to the
  dtype of what is written to. `no bfloat16`, `no float16`: there is no right kernel for it, so the op runs in float32.

"""

_TENSORPLAY_NAMES = """## Names of TensorPlay's functions

These names, in policies, TOML files and `mezzo ops --framework tensorplay`, stand for ops that are called otherwise. A
function may be composed in Python of several ops. If there is an op of its name, the rule of that casts what the function
is given; else a rule for it is an error, and the rules of the ops in the last column decide. `kl_div` alone covers the op of
that name and what `tensorplay.nn.functional.kl_div` enters, `tp_kl_div`. `tensorplay.nn.functional.` is written `F.`.

| name | ops | composed of |
|---|---|---|
"""

_SHORT = {
    "lower_precision_fp": "lower",
    "fp32": "fp32",
    "fp32_set_opt_dtype": "set dtype",
    "fp32_append_dtype": "append dtype",
    "promote": "promote",
    "banned": "banned",
    "banned_lower_precision": "banned if low",
    "fallthrough": "as is",
}

_COLUMNS = ("cpu", "cuda", "xpu", "mps", "reference")


def reference() -> str:
    """Make the op reference.

    Returns:
        Markdown.
    """
    columns = {device: {op: str(rule) for op, rule in tables.device_table(device).items()} for device in _COLUMNS}
    for device, rules in columns.items():
        rules.update(dict.fromkeys(tables.own_kernels(device), "own"))
    columns["unified"] = {op: str(rule) for op, rule in builtin_policy("unified").ops.items()}
    names = sorted(
        {op for rules in columns.values() for op in rules}, key=lambda op: (op.removeprefix("aten::").lstrip("_"), op)
    )
    lines = [f"| op | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for op in names:
        cells = [_SHORT.get(rules.get(op, "-"), rules.get(op, "-")) for rules in columns.values()]
        lines.append(f"| `{op.removeprefix('aten::')}` | {' | '.join(cells)} |")
    return _HEAD + "\n".join(lines) + "\n\n" + _aliases() + "\n" + _jax() + "\n" + _tensorplay()


def _jax() -> str:
    words, rules, other = vocabulary("jax"), tables.device_table("xla", "jax"), tables.differing("xla", "jax")
    lines = ["| primitive | rule | traits |", "|---|---|---|"]
    # What `register_primitive` taught the vocabulary is no part of the tables.
    for op, rule in sorted(rules.items()):
        cell = _SHORT.get(rule, rule) + (f", in float16 {_SHORT.get(other[op], other[op])}" if op in other else "")
        lines.append(f"| `{op}` | {cell} | {', '.join(sorted(words.traits[op])) or '-'} |")
    return _JAX_HEAD + "\n".join(lines) + "\n\n" + _JAX_NAMES + "\n".join(_names("jax")) + "\n"


def _tensorplay() -> str:
    columns = {device: _cells(device) for device in tables.devices("tensorplay")}
    columns["unified"] = {op: _SHORT[rule] for op, rule in tables.unified("tensorplay").items()}
    columns["repair"] = _repairs()
    ops = sorted({op for cells in columns.values() for op in cells}, key=lambda op: (op.lstrip("_"), op))
    rows = [f"| `{op}` | {' | '.join(cells.get(op, '-') for cells in columns.values())} |" for op in ops]
    table = "\n".join([f"| op | {' | '.join(columns)} |", "|---|" + "---|" * len(columns), *rows])
    return _TENSORPLAY_HEAD + table + "\n\n" + _TENSORPLAY_NAMES + "\n".join(_names("tensorplay")) + "\n"


def _cells(device: str) -> dict[str, str]:
    rows = tables.read("tensorplay", device)
    return {row["op"]: _SHORT[row["policy"]] + ("" if row["origin"] == "native" else " `*`") for row in rows}


def _repairs() -> dict[str, str]:
    kinds, lacking = tables.repair_kinds("tensorplay"), tables.lacking("tensorplay")
    return {
        op: ", ".join([*([kinds[op]] if op in kinds else []), *(f"no {low}" for low in sorted(lacking.get(op, ())))])
        for op in tables.repairs("tensorplay")
    }


def _aliases() -> str:
    lines = [
        "## Python names",
        "",
        "These names, in policies, TOML files and `mezzo ops`, stand for ops that are called otherwise.",
        "",
        "| name | ops | and inside these |",
        "|---|---|---|",
    ]
    return "\n".join([*lines, *_names("torch")]) + "\n"


def _names(framework: str) -> list[str]:
    aliases = sorted(vocabulary(framework).aliases.items())
    return [f"| `{name}` | {_ops(alias.ops)} | {_ops(alias.inside)} |" for name, alias in aliases]


def _ops(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
