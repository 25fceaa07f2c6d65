"""A report made by hand: a net of blocks, forward and backward, with numbers that are known."""

from __future__ import annotations

from mezzo.report import Finding, OpRecord, Region, Report, SourceLine
from mezzo.report.numbers import Loss, Numbers

__all__ = ["NASTY", "many_ops", "nasty", "sample", "with_initialisation"]

FILE = "/home/someone/nets/model.py"
SIZE, BATCH = 64, 8
NASTY = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'>\u2028 & \"{{data}}\""


def numbers(exponent: int, *, error: float | None = None, inf: int = 0) -> Numbers:
    """Three exponents around one, a thousand numbers in all."""
    exponents = {exponent - 1: 300, exponent: 600, exponent + 1: 100}
    overflow = sum(count for at, count in exponents.items() if at >= 16) / 1000
    underflow = sum(count for at, count in exponents.items() if at < -25) / 1000
    losses = {"float16": Loss(overflow, underflow, 0.0), "bfloat16": Loss()}
    return Numbers(1000, 2.0 ** (exponent + 1), 2.0 ** (exponent - 1), 0, inf, losses, exponents, error)


def block(layer: int) -> list[OpRecord]:
    """A linear layer, its softmax in float32, and the linear layer's backward pass."""
    path, x, w = f"blocks.{layer}", (BATCH, SIZE), (SIZE, SIZE)
    linear = OpRecord(
        "aten::linear",
        "lower_precision_fp",
        path=(f"{path}.linear",),
        source=SourceLine(FILE, 12, "forward"),
        came=("float32", "float32"),
        used=("bfloat16", "bfloat16"),
        gave=("bfloat16",),
        shapes_in=(x, w),
        shapes_out=(x,),
        dot=True,
        operands=("", f"{path}.linear.weight"),
        kept=(1,) if layer else (),
        numbers=numbers(16 if layer == 2 else layer, error=0.001 * (layer + 1), inf=5 if layer == 2 else 0),
    )
    softmax = OpRecord(
        "aten::softmax",
        "fp32",
        "rule of aten::softmax in the policy 'default' on cpu",
        path=(path,),
        source=SourceLine(FILE, 13, "forward"),
        came=("bfloat16",),
        used=("float32",),
        gave=("float32",),
        shapes_in=(x,),
        shapes_out=(x,),
        numbers=numbers(-3, error=0.25 if layer == 1 else 0.0005),
    )
    backward = OpRecord(
        "aten::mm",
        "inside backward",
        path=(f"{path}.linear",),
        source=SourceLine(FILE, 12, "forward"),
        came=("bfloat16", "bfloat16"),
        used=("bfloat16", "bfloat16"),
        gave=("bfloat16",),
        shapes_in=(x, w),
        shapes_out=(x,),
        dot=True,
        phase="backward",
        numbers=numbers(-27),
    )
    return [linear, softmax, backward]


def sample(blocks: int = 4) -> Report:
    """The forward pass of all blocks, then the backward pass of all."""
    made = [block(layer) for layer in range(blocks)]
    records = [one for parts in made for one in parts[:2]] + [parts[2] for parts in reversed(made)]
    findings = (
        Finding(
            "float32 memory",
            "softmax gave 2.0 KiB in float32",
            "If that costs too much: `policy.override({'softmax': 'lower_precision_fp'})`",
            SourceLine(FILE, 13, "forward"),
            ("blocks.1",),
            count=4,
        ),
        *(
            Finding("weight cast again", f"`w{number}` was cast twice", path=(f"blocks.{number}",))
            for number in range(8)
        ),
    )
    settings = {"dtype": "bfloat16", "policy": "default", "device": "cpu"}
    return Report("Net", "torch", (Region("Net", settings, tuple(records), findings),), ("one note",))


def many_ops(number: int) -> Report:
    """The sample's ops again and again."""
    some = sample().records
    records = (some * (number // len(some) + 1))[:number]
    return Report("Long", "torch", (Region("Long", {"dtype": "bfloat16"}, records),))


def with_initialisation() -> Report:
    """The sample after a layer has been made: two ops in place, a check on the line of one of them, and a batch."""
    made = [("aten::uniform_", 3), ("aten::any", 3), ("aten::fill_", 4), ("aten::randn", 5)]
    before = tuple(
        OpRecord(op, "autocast off", source=SourceLine(FILE, line), gave=("float32",), shapes_out=((SIZE,),))
        for op, line in made
    )
    # In place too, and not before the modules run.
    after = OpRecord("aten::add_", "autocast off", source=SourceLine(FILE, 40), gave=("float32",), shapes_out=((),))
    finding = Finding("weight cast again", "cast twice", source=SourceLine(FILE, 3))
    return Report("Net", "torch", (Region("Net", {}, (*before, *sample().records, after), (finding,)),))


def nasty() -> Report:
    """Text that would be HTML, or a part of the page's own template, wherever text can be."""
    record = OpRecord(
        NASTY,
        NASTY,
        NASTY,
        (NASTY,),
        SourceLine(NASTY, 1, NASTY),
        ("float32",),
        ("bfloat16",),
        ("bfloat16",),
        shapes_in=((2, NASTY),),
        shapes_out=((),),
        operands=(NASTY,),
        phase=NASTY,
    )
    finding = Finding(NASTY, NASTY, NASTY, SourceLine(NASTY, 1, NASTY), (NASTY,))
    return Report(NASTY, NASTY, (Region(NASTY, {NASTY: NASTY}, (record,) * 3, (finding,)),), (NASTY,))
