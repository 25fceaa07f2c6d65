"""Every example runs by itself, warns of nothing, and says what it promises."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.programs import COMPILER, run_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

EXPECTED = {
    "torch_train_cpu.py": r"bfloat16 +unified +0\.\d{4} +9\d\.\d%",
    "torch_inference.py": r"traced: +output torch\.bfloat16, three runs equal to eager: True",
    "torch_custom_function.py": r"backward of Product runs in torch\.float32 under 'fp32'",
    "torch_policy.py": r"in torch\.float16: x @ x is torch\.float32 with largest value 360000",
    "torch_steer_trainer.py": r"fp32 +last loss \d\.\d{4}; in one step 5 ops in float32",
    "torch_scaler_typical.py": r"scaling alone leaves float32 training as it is: True",
    "torch_scaler_clipping.py": r"by the scaler: largest norm in a step 0\.500, .* at most 2%: True",
    "torch_scaler_accumulation.py": r"inside of accumulate\(\): the other's gradient is off by 0\.\d%",
    "torch_scaler_penalty.py": r"penalties off by at most 0\.\d\d%, at most 2%: True",
    "torch_scaler_several_models.py": r"float16, Inf +losses .*; steps made 30 and 29, scale 2048",
    "torch_scaler_losses.py": r"two scalers: .*; small head off by \d\.\d%, at most 5%: True",
    "torch_scaler_data_parallel.py": r"(InThreads|DataParallel) +loss 2\.\d+ -> 0\.\d+, output torch\.float16",
    "torch_scaler_ddp.py": r"same scale, steps and parameters on both: True",
    "torch_scaler_ddp_devices.py": r"head on (cpu|cuda:1): loss 2\.\d+ -> 1\.\d+, 29 of 30 steps, output torch\.float16",
    "torch_scaler_custom_functions.py": r"bound times the scale: .*, weight off by \d\.\d%, at most 2%: True",
    "torch_scaler_custom_optimizer.py": r"SignMomentumOnDevice +loss 2\.\d+ -> 1\.\d+, 29 of 30 steps, 0 host reads",
    "torch_prepare.py": r"(?s)prepared +last loss 0\.\d+, accuracy 9\d\.\d%\n.*same float32 weights: True\n.*"
    r"parameters +137,512 +68,820\n.*1\.weight +torch\.float32 +batch_norm does not run in lower precision",
    "torch_prepare_float16.py": r"(?s)prepared: .*weights torch\.float16, gradients torch\.float32\n"
    r"same losses: True, same float32 weights: True",
    "torch_prepare_ddp.py": r"(?s)rank 1: loss 2\.\d+ -> 1\.\d+, gradients torch\.float32.*same masters on both: True",
    "torch_prepare_inference.py": r"(?s)equal to autocast's: True\n.*\n14,688,160 bytes of parameters, now 7,864,272\n"
    r".*with the embedding: 7,352,272 bytes",
    "torch_accelerator.py": r"(?s)float16, scaled +2\.\d+ -> 0\.\d+ +float16 +float16 +float32 +float32\n.*"
    r"rule for gelu: fallthrough, now fp32\nbfloat16, new rule +2\.\d+ -> 0\.\d+ +bfloat16 +float32 ",
    "torch_scaler_watch.py": r"(?s)(\d\d) of 30 steps made, \1 by .* lowered 2 times.*  0\.weight: 4096 NaN, 0 Inf of 4096"
    r".*5 steps of SGD in a row were skipped .*2\.bias: 10 NaN",
    "torch_scaler_history.py": r"(?s)amp/skipped at step 0\n.*amp/skipped at step 40\n.*180 numbers told of 60 steps; last "
    r"loss [01]\.\d+\n.*  step  0: 2\*\*22\n.*picture of \d+ kB in scale\.png",
    "jax_mlp.py": r"(?s)autocast +0\.0\d+ +9\d\.\d% +float32\n.*bfloat16 x bfloat16 -> bfloat16\n.*dot_general +lower_prec",
    "jax_transformer_scan.py": r"(?s)autocast +last loss 0\.\d+, accuracy 9\d\.\d%\ngradients off by \d\.\d%, "
    r"at most 5% .*\nbfloat16 x bfloat16 -> bfloat16: 8, run 20 times",
    "jax_float16_scaler.py": r"(?s)by hand: loss 0\.\d+, within 3% of float32: True; 2 steps skipped, scale now 262144\n"
    r".*by optax: loss 0\.\d+, within 3% of float32: True; 2 steps skipped, scale now 262144",
    "jax_sharded.py": r"(?s)jit +last loss 0\.\d+, on 8 devices; parameters as on one: True\n"
    r"shard_map +last loss 0\.\d+, on 8 devices; parameters as on one: True",
    "jax_flax.py": r"(?s)linen +accuracy 9\d\.\d%, .* float32\nnnx +accuracy 9\d\.\d%, .* float32\n"
    r"MutationError: .*nnx\.split\(model, nnx\.Param, \.\.\.\)",
    "jax_equinox.py": r"(?s)last loss 0\.\d+, accuracy 9\d\.\d%, parameters in float32\n"
    r"bfloat16 x bfloat16 -> bfloat16: 2\nwarnings: 0",
    "tensorplay_train_cuda.py": r"(?s)(cuda: output tensorplay\.float16|needs CUDA, .*\ncpu: output tensorplay\.bfloat16), "
    r"loss tensorplay\.float32, weight tensorplay\.float32, gradient tensorplay\.float32\n.*at most a tenth: True",
    "tensorplay_train_cpu.py": r"(?s)own +last loss nan, accuracy 1\d\.\d%\nbfloat16, mezzo's +last loss 0\.0\d+, "
    r"accuracy 9\d\.\d%",
    "tensorplay_decorator.py": r"(?s)forward: output tensorplay\.bfloat16, gradient tensorplay\.float32\n"
    r"function: tensorplay\.float16, autocast afterwards: False\nautocast_decorator: tensorplay\.float32 where",
    "tensorplay_inference.py": r"(?s)within 0\.03 of float32: True\nTensorPlay has no tensorplay\.jit: .*"
    r"three runs, output tensorplay\.bfloat16, \(1, 2\)",
    "tensorplay_nested.py": r"(?s)nested, disabled: tensorplay\.float32; in again: tensorplay\.(b?float16)\n"
    r"nested, disabled by tensorplay\.autocast: tensorplay\.float32; in again: tensorplay\.\1\n"
    r"nested, policy fp32, .*: tensorplay\.float32; in again: tensorplay\.\1",
    "tensorplay_custom_function.py": r"(?s)MyMM tensorplay\.bfloat16, MyFloat32Func tensorplay\.float32, needs a gradient: "
    r"True\n  backward of MyMM computes in tensorplay\.bfloat16\ngradient of the weight: tensorplay\.float32, all "
    r"positive: True\nMyFloat32Func of float64: tensorplay\.float64",
    "tensorplay_float16_scaler.py": r"less than a tenth with it: True; without it: False",
}
"""Name of the script to a pattern of the line that matters."""


OWN_PROCESS = {"torch_policy.py", "jax_mlp.py"}
"""Scripts that a process of their own runs: one of PyTorch's and one of JAX's, on top of those that need it."""


def run(name: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a reader does, with warnings as errors."""
    script = EXAMPLES / name
    tensorplay = script.name.startswith("tensorplay_")
    compiles = COMPILER.search(script.read_text(encoding="utf-8")) is not None
    return run_python([str(script)], own=tensorplay or compiles or name in OWN_PROCESS)


@pytest.mark.parametrize(("name", "line"), EXPECTED.items(), ids=EXPECTED)
def test_example_runs_and_says(name: str, line: str) -> None:
    if name.startswith("tensorplay_") and find_spec("tensorplay") is None:
        pytest.skip("tensorplay is not installed")
    done = run(name)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(line, done.stdout), done.stdout


def test_every_example_is_tested() -> None:
    scripts = {path.name for framework in ("torch", "jax", "tensorplay") for path in EXAMPLES.glob(f"{framework}_*.py")}
    assert scripts == set(EXPECTED)
