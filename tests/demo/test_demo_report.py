"""The table, the speed-up and the choice of device, apart from any training."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from mezzo.demo.devices import describe, pick_device, single_threaded
from mezzo.demo.report import memory_table, results_table
from mezzo.demo.results import RunResult, speed_up


def result(model="transformer", precision="float32", seconds=(2.0, 2.0, 2.0), **changes):
    fields = {
        "parameters": 10,
        "train_losses": (2.0, 0.5),
        "test_losses": (2.1, 0.6),
        "test_accuracy": 0.987,
        "peak_memory_bytes": 1234 * 2**20 + 2**19,
        "ops_by_dtype": {"bfloat16": 12, "float32": 34},
        "casts": 1234,
    }
    return RunResult(model=model, precision=precision, epoch_seconds=seconds, **{**fields, **changes})


def printed(results, width):
    return shown(results_table(results, "a CPU"), width)


def shown(table, width):
    screen = io.StringIO()
    Console(file=screen, width=width).print(table)
    return screen.getvalue()


def test_speed_up_compares_the_times_of_one_model():
    """6 s against 3 s; the other model's time does not matter."""
    plain, mixed = result(), result(precision="bfloat16", seconds=(1.0, 1.5, 0.5))
    other = result(model="conv net", seconds=(90.0,))
    assert speed_up(mixed, [other, plain, mixed]) == 2.0
    assert speed_up(plain, [plain, mixed]) == 1.0


def test_speed_up_needs_a_float32_run_of_the_same_model():
    mixed = result(precision="bfloat16")
    assert speed_up(mixed, [result(model="conv net"), mixed]) is None
    assert " - " in printed([mixed], 120)


def test_a_row_holds_the_numbers():
    line = next(line for line in printed([result()], 120).splitlines() if line.startswith("transformer"))
    cells = ("float32", "0.5000", "98.7%", "6.0", "1.00x", "1234.5", "bfloat16 12, float32 34", "1234", "-")
    assert " ".join(line.split()[1:]) == " ".join(cells)


def test_a_scaled_run_says_how_many_steps_it_skipped():
    """None skipped is a number too; a dash means that no scaler was there."""
    for skipped in ((), (2, 3)):
        text = printed([result(precision="float16", scales=(4.0, 2.0, 1.0), skipped_steps=skipped)], 120)
        row = next(line for line in text.splitlines() if line.startswith("transformer"))
        assert row.split()[-1] == str(len(skipped))


def test_the_caption_owns_up_to_emulation():
    """Only where a run was emulated."""
    advice = "its time is not float16's"
    assert advice in printed([result(), result(precision="float16", emulated=True)], 80)
    assert advice not in printed([result(), result(precision="float16")], 80)


def test_a_star_says_that_a_run_was_prepared():
    """With its meaning below the table, only where there is one."""
    meaning = "*: prepared, so that weights are stored in this dtype"
    text = printed([result(), result(precision="bfloat16", prepared=True)], 80)
    assert " bfloat16* " in text
    assert meaning in text
    assert meaning not in printed([result(), result(precision="bfloat16")], 80)


def test_what_is_held_is_shown_for_models_that_were_prepared_too():
    """In MiB, apart by kind; a model without a prepared run has nothing to compare."""
    held = {name: number * 2**20 for name, number in (("weights", 4), ("gradients", 3), ("state", 2), ("masters", 1))}
    runs = [
        result(model="conv net", held_bytes=held),
        result(held_bytes={**held, "masters": 0}),
        result(precision="float16", prepared=True, held_bytes={**held, "weights": 1234 * 2**20}),
    ]
    text = shown(memory_table(runs), 80)
    rows = [line.split() for line in text.splitlines() if line.startswith(("transformer", "conv"))]
    assert rows == [
        ["transformer", "float32", "4.00", "3.00", "2.00", "0.00"],
        ["transformer", "float16*", "1234.00", "3.00", "2.00", "1.00"],
    ]


def test_large_numbers_fit_into_eighty_columns():
    """What a log file gets: wrapped where it must be, cut nowhere."""
    scaled = result(precision="float16", scales=(1.0,) * 1000, skipped_steps=tuple(range(1, 556)), emulated=True)
    prepared = result(precision="bfloat16", test_accuracy=1.0, prepared=True)
    text = printed([result(seconds=(400.0, 199.9)), prepared, scaled], 80)
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for number in ("599.9", "1234.5", "0.5000", "98.7%", "100.0%", "bfloat16 12", "float32 34", "1234", "555", "skips"):
        assert number in text


def test_no_listed_op_is_shown_as_a_dash():
    text = printed([result(ops_by_dtype={}, casts=0)], 120)
    row = next(line for line in text.splitlines() if line.startswith("transformer"))
    assert row.split()[-3:] == ["-", "0", "-"]


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match=r"'warp' is not one that PyTorch knows; expected a name like 'cpu'"):
        pick_device("warp")


def test_a_device_without_autocast_is_refused():
    with pytest.raises(ValueError, match="'meta' has no autocast; leave the device out"):
        pick_device("meta")


def test_an_absent_device_is_refused():
    absent = "cuda:99" if torch.cuda.is_available() else "cuda"
    with pytest.raises(ValueError, match=f"'{absent}' is not present here; use 'cpu'"):
        pick_device(absent)


def test_the_processor_is_always_there():
    assert pick_device("cpu") == torch.device("cpu")
    assert describe(torch.device("cpu")).endswith("CPU, 1 thread")


def test_one_thread_until_the_region_ends():
    """By return or by exception, the caller's count comes back."""
    torch.set_num_threads(2)
    with pytest.raises(KeyError), single_threaded():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
