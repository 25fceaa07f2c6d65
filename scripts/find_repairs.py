"""Find the ops that raise a dtype error under ``torch.autocast`` on the CPU, and write them to ``repairs.csv``.

    python scripts/find_repairs.py            # write src/mezzo/tables/torch/repairs.csv
    python scripts/find_repairs.py --check    # write nothing; status 1 if the table is not what this PyTorch needs
    python scripts/find_repairs.py --report notes.md

The calls of ``mixed_calls.py`` are made with their float tensors in all dtypes, alike and mixed. Where a call raises, and
the same call with all of them in the widest dtype does not, the error is one of dtypes. The op to repair is the innermost
one at which a repair makes the whole call work, with a result of the dtype that the widest call gives. Ops below autograd
are left out: a cast there has no gradient. It takes about five minutes, in two processes.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from mixed_calls import Call, Mix, all_calls, calls_of_overloads, run, variants
from recording_kernels import ERRORS, RECORDER, Frame, floats, install, is_destination, widest

from mezzo import tables

TARGET = Path(__file__).parent.parent / "src" / "mezzo" / "tables" / "torch" / "repairs.csv"
CAST = tables.device_table("cpu")
LOW = (torch.bfloat16, torch.float16)
SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}
# What the calls here do not show. Under vmap and jacrev the backward of a norm is called above autograd, with a float32
# gradient and a low input; and of two ops a mixed call works and then raises in the backward, so it is promoted beforehand.
BY_HAND = {
    "aten::native_batch_norm_backward": "promote",
    "aten::native_group_norm_backward": "promote",
    "aten::native_layer_norm_backward": "promote",
    "aten::addr": "promote first",
    # It would be repaired inside, where it writes to a low tensor; its kin give float32.
    "aten::_linalg_det": "promote",
    # Made up of ops that are not watched inside, since PyTorch lists these; the calls here have too few tensors to show it.
    **dict.fromkeys(
        (
            f"aten::{name}"
            for name in (
                "binary_cross_entropy_with_logits",
                "cosine_embedding_loss",
                "cross_entropy_loss",
                "hinge_embedding_loss",
                "kl_div",
                "l1_loss",
                "lu_solve",
                "margin_ranking_loss",
                "mse_loss",
                "multilabel_margin_loss",
                "orgqr",
                "poisson_nll_loss",
                "smooth_l1_loss",
                "soft_margin_loss",
                "stft",
                "stft.center",
                "triplet_margin_loss",
            )
        ),
        "promote",
    ),
    "aten::huber_loss": "promote first",
}
# What PyTorch's own promotion says of the low dtype that is not the region's. The kernels have it.
OTHER_REGION = "Unexpected floating ScalarType in at::autocast::prioritize"


@dataclass
class Findings:
    """What the calls have shown.

    Attributes:
        repairs: Op to its repair, ``""`` where only low dtypes are not taken.
        lacks: Op to the low dtypes that its kernel does not take.
        left: Calls that no repair cures: name and what was found to the mixes.
        texts: The errors' texts, each with an op that raised it.
        works: The mixes that work as they are, by call.
        raises: The mixes that raise, by call.
        backward: The mixes of which only the backward raises, by call.
    """

    repairs: dict[str, str] = field(default_factory=dict)
    lacks: dict[str, set[torch.dtype]] = field(default_factory=dict)
    left: dict[tuple[str, str], dict[str, None]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    works: dict[str, dict[str, None]] = field(default_factory=dict)
    raises: dict[str, dict[str, None]] = field(default_factory=dict)
    backward: dict[str, dict[str, str]] = field(default_factory=dict)


def examine(call: Call, findings: Findings) -> None:
    """Make a call in all dtypes and note which ops have to be repaired."""
    if isinstance(wide_result(call, ((), None)), Exception):
        return
    for mix in variants(call):
        found = run(call, mix)
        if not isinstance(found, Exception):
            findings.works.setdefault(call.name, {})[spelled(mix)] = None
            examine_backward(call, mix, found, findings)
            continue
        trace = RECORDER.trace
        wide = wide_result(call, mix)
        if isinstance(wide, Exception):
            continue
        findings.raises.setdefault(call.name, {})[spelled(mix)] = None
        wanted = None if call.outs or call.in_place else dtypes_of(wide)
        frames = choose(call, mix, trace, wanted)
        if not frames:
            key = (call.name, f"{first_line(found)} [{' > '.join(f.op for f in trace)}]")
            findings.left.setdefault(key, {})[spelled(mix)] = None
        for frame in frames:
            findings.texts.setdefault(first_line(found), frame.op)
            note(frame, findings, lacks=OTHER_REGION not in str(found))


def spelled(mix: Mix) -> str:
    """Spell a mix shortly: ``bf16,f32->f16``, ``all f32``, ``#3 f64, rest bf16``."""
    dtypes, out = mix
    odd = [place for place, dtype in enumerate(dtypes) if dtypes.count(dtype) == 1]
    text = ",".join(SHORT[dtype] for dtype in dtypes)
    if len(set(dtypes)) == 1:
        text = f"all {SHORT[dtypes[0]]}"
    elif len(dtypes) > 2 and len(odd) == 1:
        text = f"#{odd[0] + 1} {SHORT[dtypes[odd[0]]]}, rest {SHORT[dtypes[odd[0] - 1]]}"
    return text + (f"->{SHORT[out]}" if out else "")


def first_line(error: Exception) -> str:
    """Give the first line of an error's text."""
    return (str(error).splitlines() or [repr(error)])[0][:200]


def wide_mix(call: Call, mix: Mix) -> Mix:
    """Give the one dtype in which a call should have been made, and which the CPU has kernels for."""
    dtypes, out = mix
    dtype = widest([*dtypes, *([out] if out else [])])
    return (dtype,) * call.count(), dtype if call.outs else None


def wide_result(call: Call, mix: Mix) -> Any:
    """Make the call in the one dtype in which it should have been made; without autocast if it raises under it."""
    result = run(call, wide_mix(call, mix))
    if isinstance(result, Exception):
        with torch.autocast("cpu", enabled=False):
            result = run(call, wide_mix(call, mix))
    return result


def dtypes_of(result: Any) -> list[torch.dtype]:
    """Give the dtypes of the floating tensors of a result."""
    return [tensor.dtype for tensor in floats(result)]


def choose(call: Call, mix: Mix, trace: tuple[Frame, ...], wanted: list[torch.dtype] | None) -> list[Frame]:
    """Find the innermost op at which a repair makes a call work as it should; several where the call has several steps."""
    chosen: list[Frame] = []
    for _ in range(5):
        repaired = frozenset(frame.op for frame in chosen)
        candidates = [frame for frame in reversed(trace) if not frame.below_autograd and frame.op not in repaired]
        moved: tuple[Frame, tuple[Frame, ...]] | None = None
        for frame in candidates:
            result = run(call, mix, repaired | {frame.op})
            if not isinstance(result, Exception):
                if wanted in (None, dtypes_of(result)):
                    return [*chosen, frame]
            elif moved is None and RECORDER.trace != trace:
                moved = frame, RECORDER.trace
        if moved is None:
            return []
        chosen.append(moved[0])
        trace = moved[1]
    return []


def note(frame: Frame, findings: Findings, *, lacks: bool) -> None:
    """Enter an op into the findings."""
    # Sparse tensors have other kernels, and an op that autocast casts for does not run in the dtype that it was called in.
    own_kernel = (frame.strided or "sparse" in frame.op) and frame.op not in CAST
    if lacks and own_kernel and len(frame.dtypes) == 1 and frame.dtypes <= set(LOW):
        findings.repairs.setdefault(frame.op, "")
        findings.lacks.setdefault(frame.op, set()).update(frame.dtypes)
    else:
        findings.repairs[frame.op] = "destination" if is_destination(frame.op) else "promote"


def examine_backward(call: Call, mix: Mix, result: Any, findings: Findings) -> None:
    """Note a call whose backward, outside the region, raises what it does not raise in the widest dtype."""
    error = backward_error(result)
    if error is not None and backward_error(wide_result(call, mix)) is None:
        findings.backward.setdefault(call.name, {})[spelled(mix)] = first_line(error)


def backward_error(result: Any) -> Exception | None:
    """Run the backward of the sum of a result; give the error that came."""
    roots = [tensor for tensor in floats(result) if tensor.requires_grad]
    RECORDER.reset(frozenset())
    with torch.autocast("cpu", enabled=False):
        try:
            if roots:
                torch.autograd.backward([root.sum() for root in roots])
        except ERRORS as error:
            return error
    return None


def search(low: torch.dtype) -> Findings:
    """Make all calls in a region of one dtype, in a process of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    findings = Findings()
    library = install()
    with torch.autocast("cpu", dtype=low):
        for call in all_calls():
            with torch.no_grad():
                RECORDER.capturing = True
                run(call, wide_mix(call, ((), None)))
                RECORDER.capturing = False
                examine(call, findings)
            if not call.outs and not call.in_place:
                examine(call, findings)
        with torch.no_grad():
            for call in calls_of_overloads():
                examine(call, findings)
    del library
    return findings


def merged(one: Findings, other: Findings) -> Findings:
    """Put together what two regions have shown."""
    for op, how in other.repairs.items():
        one.repairs[op] = how or one.repairs.get(op, "")
    for op, dtypes in other.lacks.items():
        one.lacks.setdefault(op, set()).update(dtypes)
    one.texts.update(other.texts)
    for mine, theirs in ((one.left, other.left), (one.works, other.works), (one.raises, other.raises)):
        for name, mixes in theirs.items():
            mine.setdefault(name, {}).update(mixes)  # type: ignore[arg-type]
    for name, errors in other.backward.items():
        one.backward.setdefault(name, {}).update(errors)
    return one


def table(findings: Findings) -> str:
    """Write the table as text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["op", "repair", "lacks"])
    for op, how in sorted({**findings.repairs, **BY_HAND}.items()):
        lacks = findings.lacks.get(op, set())
        writer.writerow([op, how, " ".join(str(d).removeprefix("torch.") for d in LOW if d in lacks)])
    return text.getvalue()


def report(findings: Findings) -> str:
    """Write as Markdown what the table does not say."""
    lines = ["# Calls that no repair cures", ""]
    lines += [f"- {name}: {', '.join(mixes)}: {what}" for (name, what), mixes in findings.left.items()]
    lines += ["", "# Mixes of which only the backward raises", ""]
    for name, mixes in findings.backward.items():
        lines += [f"- {name}: {', '.join(mixes)}: {next(iter(mixes.values()))}"]
    lines += ["", "# Calls of which some mixes work natively and others raise", ""]
    for name, raising in findings.raises.items():
        works = [mix for mix in findings.works.get(name, ()) if "," in mix or "->" in mix]
        if works:
            lines += [f"- {name}", f"  - work: {'; '.join(works)}", f"  - raise: {'; '.join(raising)}"]
    lines += ["", "# Texts", "", *(f"- {op}: {text}" for text, op in findings.texts.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the table and write nothing")
    parser.add_argument("--report", type=Path, help="also write what was seen to this file")
    options = parser.parse_args()
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("spawn")) as pool:
        findings = merged(*pool.map(search, LOW))
    found = table(findings)
    if options.report:
        options.report.write_text(report(findings))
    if not options.check:
        TARGET.write_text(found)
    elif found != TARGET.read_text():
        sys.exit(f"{TARGET} is not what torch {torch.__version__} needs; run scripts/find_repairs.py")


if __name__ == "__main__":
    main()
