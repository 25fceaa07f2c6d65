"""What ``mezzo run`` opens around a script: how long it records, which thread and process it watches, that it closes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.cli.run_plan import RunPlan
from mezzo.cli.run_watch import Watch
from mezzo.cli.script_runner import Target
from mezzo.report import Report

TARGET = Target("folder/train.py")


def open_modes() -> int:
    return torch._C._len_torch_dispatch_stack()


@pytest.fixture(autouse=True)
def _no_mode_stays() -> Iterator[None]:
    yield
    assert open_modes() == 0


class Loop:
    """A training loop of the smallest size, with as many optimizers as asked for."""

    def __init__(self, optimizers: int = 1) -> None:
        self.net = nn.Linear(2, 2)
        self.optimizers = [torch.optim.SGD(self.net.parameters(), lr=0.1) for _ in range(optimizers)]

    def step(self, *which: int) -> None:
        with torch.autocast("cpu"):
            loss = self.net(torch.ones(1, 2)).sum()
        loss.backward()
        for one in which or range(len(self.optimizers)):
            self.optimizers[one].step()


def calls_of_the_net(report: Report | None) -> int:
    assert report is not None
    return len(report.where(op="aten::linear").records)


@pytest.mark.parametrize(("steps", "recorded"), [(1, 1), (3, 3), (None, 5)])
def test_it_records_so_many_steps_and_makes_the_report_then(steps: int | None, recorded: int) -> None:
    watch, loop = Watch(RunPlan(TARGET, explain=True, steps=steps)), Loop()
    watch.start()
    for made in range(1, 6):
        loop.step()
        assert open_modes() == (steps is None or made < steps)
        assert (watch.report is None) is (steps is None or made < steps)
    watch.close()
    assert calls_of_the_net(watch.report) == recorded


def test_several_optimizers_are_counted_each_for_itself() -> None:
    watch, loop = Watch(RunPlan(TARGET, explain=True, steps=2)), Loop(optimizers=2)
    watch.start()
    loop.step(0, 1)
    assert open_modes() == 1
    loop.step(0, 1)
    watch.close()
    assert calls_of_the_net(watch.report) == 2


def test_a_mode_of_the_scripts_own_ends_first() -> None:
    class Plain(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    watch, loop = Watch(RunPlan(TARGET, explain=True, steps=1)), Loop()
    watch.start()
    with Plain():
        loop.step()
        assert open_modes() == 2
    assert open_modes() == 1
    loop.step()
    assert open_modes() == 0
    watch.close()
    assert calls_of_the_net(watch.report) == 2


def test_steps_of_other_threads_do_not_count() -> None:
    watch, loop = Watch(RunPlan(TARGET, explain=True, steps=1)), Loop()
    watch.start()
    thread = threading.Thread(target=loop.step)
    thread.start()
    thread.join()
    assert open_modes() == 1
    watch.close()
    assert calls_of_the_net(watch.report) == 0


def test_a_script_that_imports_torch_elsewhere_is_told_that_nothing_was_watched() -> None:
    watch = Watch(RunPlan(TARGET, explain=True))
    thread = threading.Thread(target=watch.start)
    thread.start()
    thread.join()
    watch.close()
    assert watch.report == Report(
        "train.py",
        "torch",
        notes=("the script imported torch in a thread that is not its main one, so nothing was watched",),
    )


def test_the_report_and_its_region_are_called_after_the_script() -> None:
    watch, loop = Watch(RunPlan(TARGET, explain=True)), Loop()
    watch.start()
    loop.step()
    watch.close()
    assert watch.report is not None
    assert (watch.report.title, watch.report.regions[0].name) == ("train.py", "train.py")
    assert watch.report.notes[-1] == "recorded to the end of step 1 of an optimizer"


def test_a_script_without_steps_is_recorded_to_its_end() -> None:
    watch, loop = Watch(RunPlan(TARGET, explain=True)), Loop()
    watch.start()
    for _ in range(5):
        with torch.autocast("cpu"):
            loop.net(torch.ones(1, 2))
    watch.close()
    assert calls_of_the_net(watch.report) == 5


def test_a_script_whose_ops_run_elsewhere_is_told_how_to_watch_them() -> None:
    watch = Watch(RunPlan(TARGET, explain=True))
    watch.start()
    watch.close()
    assert watch.report is not None
    assert "torchrun -m mezzo run" in watch.report.notes[-1]


@pytest.mark.parametrize("shadow", [False, True])
def test_numbers_and_errors_are_recorded_when_asked_for(shadow: bool) -> None:
    watch, loop = Watch(RunPlan(TARGET, explain=True, numerics=True, shadow=shadow)), Loop()
    watch.start()
    loop.step()
    watch.close()
    assert watch.report is not None
    (record,) = watch.report.where(op="aten::linear").records
    assert record.numbers is not None
    assert (record.numbers.error is not None) is shadow


def test_what_the_lint_reads_is_not_recorded() -> None:
    recorded = []
    for lint in (False, True):
        watch, loop = Watch(RunPlan(TARGET, explain=True, lint=lint)), Loop()
        loop.net.register_buffer("mask", torch.full((2,), -1e39, dtype=torch.float64))
        watch.start()
        loop.step()
        watch.close()
        assert watch.report is not None
        recorded.append([record.op for record in watch.report.records])
        kinds = {finding.kind for finding in watch.report.warnings}
        assert ("mask overflow" in kinds) is lint
    assert recorded[0] == recorded[1]


def test_a_tool_that_fails_is_a_note_and_not_the_scripts_trouble() -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            """Do nothing, with groups that are not as PyTorch makes them."""

    watch, loop = Watch(RunPlan(TARGET, explain=True, lint=True)), Loop()
    loop.optimizers = [Odd(loop.net.parameters(), lr=0.1)]
    loop.optimizers[0].param_groups.append({})
    watch.start()
    loop.step()
    watch.close()
    assert calls_of_the_net(watch.report) == 1
    assert watch.report is not None
    assert "lint failed, which is a fault of mezzo: KeyError: 'params'" in watch.report.notes


def test_closing_twice_is_closing_once() -> None:
    watch = Watch(RunPlan(TARGET, explain=True))
    watch.start()
    watch.close()
    report = watch.report
    watch.close()
    assert watch.report is report


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # from Python 3.12 on; the child is short
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX's, where other tests have imported it
def test_a_forked_process_is_not_watched_and_the_script_still_is() -> None:
    watch, loop = Watch(RunPlan(TARGET, explain=True, find_nonfinite=True)), Loop()
    watch.start()
    modes = open_modes()
    child = os.fork()
    if child == 0:
        loop.step()
        watch.close()
        os._exit(10 + open_modes() if watch.report is None else 9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    assert open_modes() == modes
    loop.step()
    watch.close()
    assert calls_of_the_net(watch.report) == 1


def test_with_a_policy_alone_nothing_is_open() -> None:
    watch, loop = Watch(RunPlan(TARGET)), Loop()
    watch.start()
    assert open_modes() == 0
    loop.step()
    watch.close()
    assert (watch.report, watch.nonfinite) == (None, None)


def test_the_search_goes_on_when_the_records_have_ended() -> None:
    watch, loop = Watch(RunPlan(TARGET, explain=True, find_nonfinite=True, steps=1)), Loop()
    watch.start()
    assert open_modes() == 2
    loop.step()
    assert open_modes() == 1
    torch.zeros(1).log()
    watch.close()
    assert calls_of_the_net(watch.report) == 1
    assert watch.nonfinite is not None
    assert watch.nonfinite.first is not None
    assert watch.nonfinite.first.op == "aten::log"


@pytest.mark.parametrize("explain", [False, True])
def test_a_report_that_was_asked_for_is_there_though_the_lint_has_found_nothing(
    explain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "__main__")  # and so may a script
    watch = Watch(RunPlan(TARGET, explain=explain, lint=True, report=tmp_path / "out.json"))
    watch.start()
    torch.ones(1).add(1)
    watch.close()
    assert watch.report is not None
    assert (watch.report.title, watch.report.warnings) == ("train.py", ())
    assert not [note for note in watch.report.notes if "fault of mezzo" in note]
