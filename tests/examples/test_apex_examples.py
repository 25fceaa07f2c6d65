"""Every example for readers of Apex's pages runs, and says what it promises; so do they as scripts that import `apex`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.programs import run_python

from .test_examples import EXAMPLES, run

APEX = EXAMPLES / "apex"

EXPECTED = {
    "training_loop.py": r"(?s)O0: conv/norm weights float32/float32, output torch\.float32, .*without amp: True\n"
    r"O1: .* float32/float32, .*False\nO2: .* float16/float32, output torch\.float32, .*\nO3: .* float16/float16, ",
    "dcgan.py": r"(?s)O1: last losses .* all were finite: True\n.*scales .*: \d+, \d+, \d+\n.*nearer: True",
    "gradient_clipping.py": r"(?s)norm at O1: .* at most 2%: True\nnorm at O2: largest 0\.500, .*: True\n"
    r"value at O1: .*: True\nvalue at O2: largest 0\.010, .*: True",
    "custom_functions.py": r"(?s)O1: +Product float16, float16; mixture float32, float32; LogOfSum float32; square float16; "
    r"Product's backward float16\n.*at most 1%: True",
    "forced_dtypes.py": r"(?s)O1 +linear: float16, einsum: float32, exp: float16, @, casts disabled: float32, "
    r"PreciseLinear: float32, sigmoid: float32\n.*at most 1e-3: True",
    "several_models.py": r"O2: losses .*; steps made \d\d and \d\d of 60, .*at most 5%: True",
    "scaler_per_loss.py": r"(?s)O1, 1 scaler: .*: False\nO1, 2 scalers: .*: True\nO2, 1 scaler: .*: False\nO2, 2 scalers: "
    r".*: True",
    "gradient_accumulation.py": r"(?s)counted 120 blocks; .*: True\n.*counted 30 blocks; .*: True\nO1: .*1e-5: True\n.*"
    r"O2: .*1e-5: True",
    "custom_batches.py": r"(?s)O2: the model sees words float16, mask float16, lengths int64, bias float16; gives Output "
    r"with scores torch\.float32, lengths torch\.int64; .*: True\nO3: .*: True",
    "checkpoints.py": r"(?s)O1: .*6 orders, .*: True\nO2: .*torch\.float32; .*: True\nO3: .*: True",
    "ddp.py": r"(?s)masters torch\.float32, weights torch\.float16\n.*same masters on both: True; .*rounded: True",
    "imagenet.py": r"(?s)patch_torch_functions +: True.*epoch 1 validation loss .*, top-1 9\d\.\d+, top-5 \d+",
}
"""Name of the script to a pattern of the lines that matter."""

UNCHANGED = {
    "imagenet.py --opt-level O2 --keep-batchnorm-fp32 False --loss-scale 128.0": r"(?s)keep_batchnorm_fp32 +: True.*"
    r"keep_batchnorm_fp32 +: False\nmaster_weights +: True\nloss_scale +: 128\.0\n.*top-1 9\d\.\d+",
    "--dtype bfloat16 training_loop.py --opt-level O2": r"O2: conv/norm weights bfloat16/float32, output torch\.float32",
    "custom_functions.py": EXPECTED["custom_functions.py"],
    "ddp.py --opt-level O1": r"(?s)masters torch\.float32, weights torch\.float32\n.*same masters on both: True",
}
"""Arguments of `python -m mezzo.apex` to a pattern. The scripts import `apex`."""


def run_unchanged(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the scripts that import `apex` itself."""
    for path in APEX.glob("*.py"):
        text = path.read_text(encoding="utf-8").replace("from mezzo.apex", "from apex")
        (folder / path.name).write_text(text, encoding="utf-8")
    return run_python(["-m", "mezzo.apex", *arguments], folder)


@pytest.mark.parametrize(("name", "lines"), EXPECTED.items(), ids=EXPECTED)
def test_example_runs_and_says(name: str, lines: str) -> None:
    done = run(f"apex/{name}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(lines, done.stdout), done.stdout


@pytest.mark.parametrize(("arguments", "lines"), UNCHANGED.items(), ids=UNCHANGED)
def test_a_script_that_imports_apex_runs_as_it_is(arguments: str, lines: str, tmp_path: Path) -> None:
    done = run_unchanged(arguments.split(), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(lines, done.stdout), done.stdout


def test_every_example_is_tested_and_says_how_it_runs_unchanged() -> None:
    assert {path.name for path in APEX.glob("*.py")} == set(EXPECTED)
    for path in APEX.glob("*.py"):
        docstring = path.read_text(encoding="utf-8").split('"""')[1]
        assert f"python -m mezzo.apex {path.name}" in " ".join(docstring.split()), path.name
