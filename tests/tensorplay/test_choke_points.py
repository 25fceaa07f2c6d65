"""The choke points: wrapped while a region is open, and what every name is before and after; the package's own queries."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import tensorplay as tp
from tensorplay.amp import autocast_mode

import mezzo.tensorplay as mt
from mezzo.errors import UnsupportedVersionError
from mezzo.tensorplay import choke_points, contract
from mezzo.tensorplay.ops import named_ops
from mezzo.tensorplay.places import places
from mezzo.vocabulary import vocabulary


def everything() -> dict[tuple[str, str], object]:
    """Give every attribute of every module of TensorPlay and of its tensor, as it is stored."""
    holders = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "tensorplay"}
    holders["tensorplay.Tensor"] = tp.Tensor
    holders["tensorplay._C._autograd"] = tp._C._autograd
    return {(place, name): value for place, holder in holders.items() for name, value in vars(holder).items()}


def changes(before: dict[tuple[str, str], object]) -> set[str]:
    after = everything()
    assert before.keys() == after.keys()
    return {".".join(place) for place, value in before.items() if after[place] is not value}


@pytest.fixture(autouse=True)
def _modules_loaded() -> Iterator[None]:
    # What is imported at first use would look like a change.
    with mt.autocast("cpu", policy="unified"):
        tp.ones(2, 2) @ tp.ones(2, 2)
    yield
    assert choke_points.open_regions() == 0


# Names


@pytest.mark.parametrize("policy", ["default", "unified", "fp32", "tensorplay"])
def test_every_name_is_what_it_was_after_the_last_exit(policy: str) -> None:
    before = everything()
    with mt.autocast("cpu", policy=policy):
        inside = changes(before)
        assert {"tensorplay._C.mm", "tensorplay.Tensor.mm", "tensorplay.Tensor.__matmul__"} <= inside
        assert inside == set(choke_points.changed_names())
    assert changes(before) == set()
    assert choke_points.changed_names() == []


def test_nothing_else_than_choke_points_and_questions_about_autocast_is_replaced() -> None:
    of_ops = {str(place) for op in vocabulary("tensorplay").traits for place in places(op)}
    with mt.autocast("cpu", policy="unified"):
        for label in set(choke_points.changed_names()) - of_ops:
            beside = (
                "tensorplay._C._autograd._activation_checkpoint",
                "tensorplay.Tensor.data",
                "tensorplay.Tensor.to",
                "tensorplay.Tensor.type_as",
                "tensorplay.Tensor.numpy",
                "tensorplay.Tensor.__array__",
                "tensorplay.Tensor.__dlpack__",
                "tensorplay.utils.swap_tensors",
                "tensorplay.nn.modules.rnn._check_attributes",
            )
            assert "autocast" in label or label in beside, label


def test_an_inner_region_with_another_policy_wraps_more_and_takes_only_that_back() -> None:
    before = everything()
    with mt.autocast("cpu", policy="default"):
        outer = changes(before)
        with mt.autocast("cpu", policy="unified"):
            assert changes(before) > outer
        assert changes(before) == outer
    assert changes(before) == set()


def test_regions_that_overlap_without_nesting_put_every_name_back() -> None:
    before = everything()
    first, second = mt.autocast("cpu"), mt.autocast("cpu", policy="unified")
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with second:
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=other)
    with first:
        thread.start()
        assert entered.wait(20)
    assert "tensorplay._C.mm" in changes(before)
    leave.set()
    thread.join()
    assert changes(before) == set()


def test_a_region_that_fails_to_open_or_whose_body_raises_leaves_no_name_behind() -> None:
    before = everything()
    with pytest.raises(KeyError), mt.autocast("cpu"):
        raise KeyError
    assert changes(before) == set()


def test_what_somebody_else_put_there_is_called_and_comes_back() -> None:
    calls, native = [], tp._C.mm

    def watching(*args: object, **kwargs: object) -> object:
        calls.append(str(args[0].dtype))  # type: ignore[attr-defined]
        return native(*args, **kwargs)

    tp._C.mm = watching
    try:
        with mt.autocast("cpu"):
            tp.mm(tp.ones(2, 2), tp.ones(2, 2))
        assert tp._C.mm is watching
    finally:
        tp._C.mm = native
    with mt.autocast("cpu"):
        assert str(tp.mm(tp.ones(2, 2), tp.ones(2, 2)).dtype) == "tensorplay.bfloat16"
    assert calls == ["tensorplay.bfloat16"]
    assert tp._C.mm is native


def test_what_somebody_else_puts_there_inside_a_region_is_left() -> None:
    native = tp._C.mm
    try:
        with mt.autocast("cpu"):
            wrapper = tp._C.mm
            tp._C.mm = functools.partial(wrapper)
            mine = tp._C.mm
        assert tp._C.mm is mine
        assert str(tp.mm(tp.ones(2, 2), tp.ones(2, 2)).dtype) == "tensorplay.float32"
    finally:
        tp._C.mm = native


def test_a_wrapper_has_the_name_and_documentation_of_what_it_stands_for() -> None:
    native = tp._C.mm
    with mt.autocast("cpu"):
        assert tp._C.mm is not native
        assert tp._C.mm.__name__ == "mm"
        assert tp._C.mm.__doc__ == native.__doc__


def test_a_patch_that_is_taken_off_after_the_region_it_was_put_on_in_heals_with_the_next() -> None:
    native = tp._C.mm
    with mt.autocast("cpu"):
        wrapper, tp._C.mm = tp._C.mm, lambda *args: args
    tp._C.mm = wrapper  # what a patch that began inside puts back
    with mt.autocast("cpu"):
        assert str(tp.mm(tp.ones(2, 2), tp.ones(2, 2)).dtype) == "tensorplay.bfloat16"
    assert tp._C.mm is native


FIRST_USE = """
import sys, threading
import tensorplay as tp, mezzo.tensorplay as mt
places = (tp._C, tp.Tensor, tp.nn.functional, tp.linalg)
before = {(place, name): value for place in places for name, value in vars(place).items()}
sys.setswitchinterval(1e-5)
barrier, x = threading.Barrier(8), tp.ones(2, 2)

def work(policy):
    barrier.wait()
    for _ in range(3):
        mt.autocast("cpu", policy=policy)(lambda: x @ x)()

threads = [threading.Thread(target=work, args=(policy,)) for policy in [None, "unified", "fp32", "tensorplay"] * 2]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
changed = [str(place) + name for (place, name), value in before.items() if vars(place)[name] is not value]
sys.exit(str(changed) if changed else 0)
"""


def test_threads_that_open_the_first_regions_of_several_policies_put_every_name_back() -> None:
    for _ in range(4):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_USE], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr


FORKING = """
import os, sys, threading, time
import tensorplay as tp, mezzo.tensorplay as mt
from mezzo.tensorplay import choke_points
native = tp._C.mm
stop = threading.Event()

def work():
    while not stop.is_set():
        with mt.autocast("cpu", policy="unified"):
            pass

thread = threading.Thread(target=work)
thread.start()
x = tp.ones(2, 2)
left = []
with mt.autocast("cpu"):
    for _ in range(30):
        child = os.fork()
        if child == 0:
            with mt.autocast("cpu", tp.float16):
                inner = str(tp.mm(x, x).dtype)
            outer = str(tp.mm(x, x).dtype)
            right = (inner, outer, choke_points.open_regions()) == ("tensorplay.float16", "tensorplay.bfloat16", 1)
            os._exit(0 if right else 1)
        left.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in left]
stop.set()
thread.join()
assert tp._C.mm is native
sys.exit(sum(codes))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_works_whatever_other_threads_held() -> None:
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# Questions


def test_the_packages_own_queries_tell_the_truth_inside() -> None:
    def ask(module: object) -> tuple[object, ...]:
        return (
            module.is_autocast_enabled("cpu"),  # type: ignore[attr-defined]
            module.is_autocast_enabled("cuda"),  # type: ignore[attr-defined]
            str(module.get_autocast_dtype("cpu")),  # type: ignore[attr-defined]
            module.is_autocast_cache_enabled(),  # type: ignore[attr-defined]
        )

    modules = (tp, tp._C, autocast_mode)
    outside = (False, False, "tensorplay.bfloat16", True)
    assert [ask(module) for module in modules] == [outside] * 3
    with mt.autocast("cpu", tp.float16, cache_enabled=False):
        inside = (True, False, "tensorplay.float16", False)
        assert [ask(module) for module in modules] == [inside] * 3
        assert str(tp.get_autocast_cpu_dtype()) == "tensorplay.float16"
        assert str(tp.get_autocast_gpu_dtype()) == "tensorplay.float16"
        assert mt.is_autocast_enabled("cpu")
        with mt.autocast("cpu", enabled=False):
            assert not tp.is_autocast_enabled("cpu")
            assert not mt.is_autocast_enabled("cpu")
    assert [ask(module) for module in modules] == [outside] * 3
    with tp.autocast("cpu", dtype=tp.float16):
        assert mt.is_autocast_enabled("cpu")
        assert str(mt.get_autocast_dtype("cpu")) == "tensorplay.float16"


def test_a_wrong_question_gets_the_packages_own_error() -> None:
    with mt.autocast("cpu"):
        with pytest.raises(ValueError, match="cpu or cuda"):
            tp.is_autocast_enabled("xpu")
        with pytest.raises(ValueError, match="cpu or cuda"):
            tp.get_autocast_dtype("xpu")
        with pytest.raises(TypeError):
            tp.set_autocast_dtype("cpu", "float16")
        assert str((tp.ones(2, 2) @ tp.ones(2, 2)).dtype) == "tensorplay.bfloat16"


def test_the_packages_setters_act_inside_and_end_with_the_region() -> None:
    x = tp.ones(2, 2)
    with mt.autocast("cpu"):
        tp.set_autocast_enabled("cpu", False)
        assert str((x @ x).dtype) == "tensorplay.float32"
        tp.set_autocast_enabled("cpu", True)
        tp.set_autocast_dtype("cpu", tp.float16)
        assert str((x @ x).dtype) == "tensorplay.float16"
        tp.set_autocast_cache_enabled(False)
        assert not tp.is_autocast_cache_enabled()
        tp.set_autocast_dtype("cpu", tp.float32)
        assert str((x @ x).dtype) == "tensorplay.float32"
    assert (tp.is_autocast_enabled("cpu"), str(tp.get_autocast_dtype("cpu"))) == (False, "tensorplay.bfloat16")
    assert tp.is_autocast_cache_enabled()


def test_another_thread_gets_its_own_answer() -> None:
    seen = []
    with mt.autocast("cpu"):
        thread = threading.Thread(target=lambda: seen.append(tp.is_autocast_enabled("cpu")))
        thread.start()
        thread.join()
    assert seen == [False]


# Which TensorPlay works


@pytest.mark.parametrize("version", ["0.1.2", "1.1.0", "2.0", "1.10.0+git"])
def test_another_series_is_refused_with_what_works(version: str) -> None:
    with pytest.raises(
        UnsupportedVersionError, match=rf"works with TensorPlay 1\.0\.\*; installed is {version.split('+')[0]}"
    ):
        contract.check_version(version)
    with pytest.raises(ImportError, match=r'pip install "tensorplay==1\.0\.\*"'):
        contract.check_version(version)


@pytest.mark.parametrize("version", ["1.0.0", "1.0.0+gite11450d", "1.0.7"])
def test_the_series_that_works_is_taken(version: str) -> None:
    contract.check_version(version)


def test_a_missing_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    contract.check_names(named_ops())
    with pytest.raises(UnsupportedVersionError, match=r"lacks tensorplay\._C\.no_such_op, on which mezzo relies"):
        contract.check_names(["mm", "no_such_op"])
    monkeypatch.delattr(autocast_mode, "_fused_enter")
    with pytest.raises(UnsupportedVersionError, match=r"lacks tensorplay\.amp\.autocast_mode\._fused_enter"):
        contract.check_names([])


def test_every_op_of_the_tables_has_a_place() -> None:
    assert [op for op in sorted(named_ops()) if not places(op)] == []
