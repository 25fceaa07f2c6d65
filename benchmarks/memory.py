"""The memory of training by how the weights are stored: ``python -m benchmarks.memory``, from the repository root.

Each way trains in fresh processes, one at a time. The bytes of tensors are counted there; the peak of the resident set is
what Linux saw of the whole process, medians over the processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.rounds import ROOT
from benchmarks.table import describe_processor, today

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from benchmarks.storing import Training

STEM = "prepare-memory-cpu"
MEBI = 2**20
TITLES = {
    "autocast": "torch.autocast, float32 weights",
    "bfloat16": "model cast whole to bfloat16",
    "prepare": "prepare",
    "compiled": "prepare(compiled=True)",
    "kahan": 'prepare(masters="kahan")',
}
COUNTS = ("parameters", "gradients", "optimizer_state", "masters")
COLUMNS = ("weights stored by", *(name.replace("_", " ") for name in COUNTS), "sum", "peak", "without the model")
NOTES = (
    "In MiB. Parameters, gradients, the optimizer's state and masters (or compensations) are the bytes of the tensors after",
    "the last step. The peak is that of the resident set of a fresh process, with its interpreter and libraries (VmHWM of",
    'Linux); "without the model" is the same process before the encoder was built and after a step of a small layer in the',
    "same way. Peaks are medians over the processes, with the least and the largest.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each way in processes of its own, print the table, write it down where told."""
    options = _parser().parse_args(arguments)
    if options.inside:
        print(json.dumps(_measure(options.inside, options.size, options.steps)))
        return 0
    ways = options.way or list(TITLES)
    # All ways in turn, so that what else the machine does meets each of them.
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(options.processes):
        for way in ways:
            found[way].append(_in_process(way, options.size, options.steps))
    page = _markdown(found, options)
    print(page)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / f"{STEM}.md").write_text(page, encoding="utf-8")
        (options.output / f"{STEM}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description="Measure training's memory.")
    parser.add_argument("--way", action="append", choices=tuple(TITLES), help="only this way (may be repeated)")
    parser.add_argument("--size", default="4x128", metavar="BxL", help="batch and length of the encoder's input")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="training steps in a process")
    parser.add_argument("--processes", type=int, default=3, metavar="N", help="fresh processes for each way")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write the results; else they are printed")
    parser.add_argument("--inside", choices=tuple(TITLES), help=argparse.SUPPRESS)
    return parser


def _in_process(way: str, size: str, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.memory", "--inside", way, "--size", size, "--steps", str(steps)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    # Only the last line: a library may print too.
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _measure(way: str, size: str, steps: int) -> dict[str, Any]:
    import torch
    from torch import nn

    from benchmarks.models import encoder
    from benchmarks.storing import Training

    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Large enough that the compiled pass is compiled for it: the compiler's memory is not the model's.
    Training(way, nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)), torch.randn(4, 256)).step()
    bare = _status("VmRSS")
    training = Training(way, *encoder(*(int(number) for number in size.split("x"))))
    for _ in range(steps):
        # As a step of `Training`, but for the last gradients, which stay and are counted.
        training.optimizer.zero_grad()
        training.backward()
        training.optimizer.step()
    return {**_count(training), "peak": _status("VmHWM"), "bare": bare, "torch": torch.__version__}


def _status(name: str) -> int:
    """A number of bytes that Linux keeps of this process; the peak is of the program alone, not of who started it."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    message = f"/proc/self/status has no {name}; this measurement needs Linux."
    raise RuntimeError(message)


def _count(training: Training) -> dict[str, int]:
    weights = list(training.model.parameters())
    return {
        "parameters": _bytes(weights),
        "gradients": _bytes([weight.grad for weight in weights if weight.grad is not None]),
        "optimizer_state": _bytes(_tensors(training.optimizer)),
        "masters": _masters(training),
    }


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if hasattr(value, "element_size")]


def _masters(training: Training) -> int:
    from benchmarks.storing import OPTIONS

    # PyTorch's ways must not load mezzo: they would then need its memory too.
    if training.way not in OPTIONS:
        return 0
    from mezzo.torch import memory_report

    return memory_report(training.model, training.optimizer).after.masters


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _markdown(found: Mapping[str, list[dict[str, Any]]], options: argparse.Namespace) -> str:
    machine = {
        **describe_processor(next(iter(found.values()))[0]["torch"], 1),
        "steps": options.steps,
        "processes": f"{options.processes} for each row",
        "date": today(),
    }
    lines = [
        f"# Memory of training, encoder of 6 layers, d=768, ({options.size.replace('x', ', ')}), AdamW (fused)",
        "",
        "; ".join(f"{name} {value}" for name, value in machine.items()) + ".",
        "",
        *NOTES,
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * len(COLUMNS),
    ]
    lines += ["| " + " | ".join(_cells(way, answers)) + " |" for way, answers in found.items()]
    return "\n".join(lines) + "\n"


def _cells(way: str, answers: Sequence[Mapping[str, int]]) -> Iterator[str]:
    counts = [answers[-1][name] for name in COUNTS]
    yield TITLES[way]
    for number in (*counts, sum(counts)):
        yield f"{number / MEBI:,.0f}"
    for name in ("peak", "bare"):
        values = [answer[name] / MEBI for answer in answers]
        yield f"{median(values):,.0f} [{min(values):,.0f}, {max(values):,.0f}]"


if __name__ == "__main__":
    sys.exit(main())
