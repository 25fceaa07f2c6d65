"""Scripts in the manner of those for Apex run unchanged, and train at each level as in float32."""

from __future__ import annotations

import functools
import re
import socket
from pathlib import Path

import pytest
import torch

from tests.programs import run_python

from .running import SCRIPTS, STAND_IN, python

IMAGENET, DCGAN, DISTRIBUTED = (
    SCRIPTS / f"{name}.py" for name in ("imagenet_style", "dcgan_style", "distributed_data_parallel")
)


@pytest.fixture(autouse=True)
def _no_dtype_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEZZO_APEX_DTYPE", raising=False)


def output(*arguments: str | Path) -> str:
    """Run a script with the stand-in, see that it ends well and says nothing on stderr, and give what it printed."""
    done = run_python([*STAND_IN, *map(str, arguments)])
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def numbers(text: str, what: str) -> list[float]:
    return [float(one) for one in re.findall(rf"{re.escape(what)} ?(-?[\d.]+)", text)]


@functools.cache
def in_float32(script: Path, option: str) -> str:
    return output(script, option, "O0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float16", "--opt-level O1"),
        ("float16", "--opt-level O2 --fused --sync_bn"),
        ("float16", "--opt-level O2 --keep-batchnorm-fp32 False --loss-scale 128.0"),
        ("float16", "--opt-level O3 --keep-batchnorm-fp32 True"),
        ("bfloat16", "--opt-level O1 --loss-scale 128.0"),
        ("bfloat16", "--opt-level O2"),
    ],
)
def test_a_script_in_the_manner_of_imagenets_trains_as_in_float32(tmp_path: Path, dtype: str, options: str) -> None:
    expected = in_float32(IMAGENET, "--opt-level")
    checkpoint = tmp_path / "checkpoint.pt"
    said = output("--dtype", dtype, IMAGENET, *options.split(), "--checkpoint", checkpoint)
    losses, reference = numbers(said, "Loss"), numbers(expected, "Loss")
    assert len(losses) == len(reference) == 27
    assert reference[-1] < reference[0] / 2
    # 24 steps that start from the same weights; a rounding to 11 bits, or to 8, is about 0.05 % or 0.4 %.
    assert losses == pytest.approx(reference, rel=0.01 if dtype == "float16" else 0.05)
    saved = torch.load(checkpoint)["state_dict"]
    assert {value.dtype for value in saved.values() if value.is_floating_point()} == {torch.float32}


def test_a_level_that_was_not_chosen_is_an_error_that_the_script_shows() -> None:
    done = python(*STAND_IN, IMAGENET)
    assert done.returncode == 1
    assert "opt_level" in done.stderr.splitlines()[-1]
    assert str(IMAGENET) in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_script_in_the_manner_of_dcgans_trains_as_in_float32(level: str) -> None:
    expected = in_float32(DCGAN, "--opt_level")
    said = output(DCGAN, "--opt_level", level)
    for what in ("Loss_D:", "Loss_G:"):
        losses = numbers(said, what)
        assert len(losses) == 12
        # Means over some hundred float16 numbers, after up to 12 steps of about 1e-3 in each weight.
        assert losses == pytest.approx(numbers(expected, what), rel=0.005)
    assert said.splitlines()[-1] == "['loss_scaler0', 'loss_scaler1', 'loss_scaler2']"


def port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


LAUNCH = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port")


def final(text: str) -> dict[str, tuple[str, str]]:
    found = re.findall(r"rank (\d) final loss = ([\d.]+) weights = (-?[\d.]+)", text)
    return {rank: (loss, weights) for rank, loss, weights in found}


@functools.cache
def in_one_process() -> str:
    return output(DISTRIBUTED)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["a launcher in the runner", "the runner in a launcher"])
def test_a_script_of_two_processes_trains_one_model(way: str) -> None:
    launch = (*LAUNCH, port())
    around = (*STAND_IN, *launch, DISTRIBUTED) if way.startswith("a launcher") else (*launch, *STAND_IN, DISTRIBUTED)
    # The launcher and PyTorch's collectives warn of each other.
    done = python(*around, warnings=())
    assert done.returncode == 0, done.stderr
    found = final(done.stdout)
    assert set(found) == {"0", "1"}
    assert found["0"][1] == found["1"][1]
    assert "mezzo" not in done.stderr
    alone = final(in_one_process())["0"]
    assert 0.5 < float(found["0"][0]) < 1.2
    assert float(alone[0]) < float(found["0"][0])  # it fits its own half of the data alone


WORKERS = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        from apex import amp
        from apex.fp16_utils import to_python_float
        return to_python_float(torch.tensor(index + 0.5)) if amp.initialize else None

def work(rank, queue):
    from apex.amp._amp_state import _amp_state
    queue.put((rank, type(_amp_state).__name__))

if __name__ == "__main__":
    from apex import amp
    loader = DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")
    print([one.item() for one in loader])
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    torch.multiprocessing.spawn(work, args=(queue,), nprocs=1)
    print(queue.get())
"""


@pytest.mark.slow
def test_workers_of_loaders_and_spawned_processes_find_amp(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORKERS)
    done = python(*STAND_IN, script, warnings=())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0.5, 1.5]\n(0, 'AmpState')\n"


def test_the_scripts_name_mezzo_nowhere() -> None:
    """They are to be scripts for Apex, so that running them says something."""
    names = sorted(path.name for path in SCRIPTS.glob("*.py"))
    assert names == ["dcgan_style.py", "distributed_data_parallel.py", "imagenet_style.py"]
    for path in SCRIPTS.glob("*.py"):
        assert "mezzo" not in path.read_text()


def test_without_the_runner_the_scripts_do_not_run() -> None:
    done = python(IMAGENET)
    assert done.returncode == 1
    assert done.stderr == "this needs NVIDIA's apex\n"
