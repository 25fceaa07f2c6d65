"""The region: its arguments and their errors, nesting with TensorPlay's own regions, threads, copies, and decorating."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import warnings
from contextlib import ExitStack

import pytest
import tensorplay as tp
from tensorplay.utils.checkpoint import checkpoint

import mezzo.tensorplay as mt
from mezzo import Policy
from mezzo.errors import DeviceError, DtypeError, PolicyError, RegionError, UnknownPolicyError

X = tp.ones(3, 3)


def dtype() -> str:
    """Name the dtype in which a product of float32 matrices comes out here and now."""
    return str((X @ X).dtype).removeprefix("tensorplay.")


# Arguments


def test_without_a_dtype_a_region_takes_what_the_package_gives() -> None:
    with mt.autocast("cpu"):
        assert dtype() == "bfloat16"
    tp.set_autocast_dtype("cpu", tp.float16)
    try:
        with mt.autocast("cpu"):
            assert dtype() == "float16"
    finally:
        tp.set_autocast_dtype("cpu", tp.bfloat16)


@pytest.mark.parametrize("device", ["mtia", "maia", "xpu", "hpu"])
def test_a_documented_device_that_this_build_lacks_is_not_available_and_an_error_on_use(device: str) -> None:
    assert mt.is_autocast_available(device) is False
    message = f"unsupported autocast device_type '{device}'. This build of TensorPlay has autocast for cpu and cuda"
    with pytest.raises(DeviceError, match=message):
        mt.autocast(device)
    with pytest.raises(RuntimeError, match="unsupported autocast device_type"):
        mt.autocast(device, enabled=False)


def test_what_is_available() -> None:
    assert [mt.is_autocast_available(name) for name in ("cpu", "cuda", "no such device")] == [True, True, False]


@pytest.mark.parametrize(
    "call", [mt.autocast, mt.is_autocast_available, lambda device: mt.custom_bwd(device_type=device)]
)
def test_a_device_type_is_a_string(call: object) -> None:
    with pytest.raises(ValueError, match=r"Expected `device_type` of type `str`, got: `<class 'int'>`"):
        call(0)  # type: ignore[operator]


@pytest.mark.parametrize("given", ["bfloat16", 16, float])
def test_a_dtype_is_one_of_tensorplays(given: object) -> None:
    with pytest.raises(
        DtypeError, match=r"dtype must be a dtype of TensorPlay, got .*; allowed are tensorplay.bfloat16"
    ):
        mt.autocast("cpu", dtype=given)


@pytest.mark.parametrize("given", [tp.float32, tp.float64, tp.int64])
def test_a_dtype_that_is_not_low_warns_and_disables_as_documented(given: object) -> None:
    with pytest.warns(UserWarning, match="In CPU autocast, but the target dtype is not supported. Disabling") as caught:
        region = mt.autocast("cpu", dtype=given)
    assert caught[0].filename == __file__
    with region:
        assert dtype() == "float32"


@pytest.mark.skipif(tp.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_warns_and_disables_as_documented() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available") as caught:
        region = mt.autocast("cuda")
    assert caught[0].filename == __file__
    with region:
        assert dtype() == "float32"
        assert not tp.is_autocast_enabled("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mt.autocast("cuda", enabled=False)


def test_a_wrong_policy_is_refused_and_nothing_is_open() -> None:
    with pytest.raises(UnknownPolicyError, match="no built-in policy"):
        mt.autocast("cpu", policy="unifed")
    with pytest.raises(PolicyError, match="is for 'torch', and this is the adapter for 'tensorplay'"):
        mt.autocast("cpu", policy=Policy("mine", {"mm": "fp32"}))
    assert dtype() == "float32"


def test_the_documented_name_spaces_make_regions() -> None:
    with mt.cpu.amp.autocast():
        assert dtype() == "bfloat16"
    with mt.cpu.amp.autocast(dtype=tp.float16):
        assert dtype() == "float16"
    with mt.cpu.amp.autocast(enabled=False):
        assert dtype() == "float32"
    assert mt.cuda.amp.autocast(False).device == "cuda"


# Policies


def test_a_policy_of_ones_own_and_a_file_rule_a_region(tmp_path: object) -> None:
    policy = Policy("mine", {"softmax": "lower_precision_fp", "mm": "fp32"}, framework="tensorplay")
    path = f"{tmp_path}/mine.toml"
    policy.save(path)
    for given in (policy, path):
        with mt.autocast("cpu", policy=given):
            assert str(tp.softmax(X, -1).dtype) == "tensorplay.bfloat16"
            assert dtype() == "float32"  # matmul is not listed
            assert str(tp.mm(X.bfloat16(), X).dtype) == "tensorplay.float32"


def test_the_default_policy_can_be_set_and_reaches_regions_that_name_none() -> None:
    mt.set_default_policy("fp32")
    try:
        assert mt.get_default_policy().name == mt.active_policy().name == "fp32"
        with mt.autocast("cpu"):
            assert dtype() == "float32"
            with mt.autocast("cpu", policy="default"):
                assert dtype() == "bfloat16"
    finally:
        mt.set_default_policy(None)
    with mt.autocast("cpu"):
        assert dtype() == "bfloat16"


def test_active_policy_is_the_innermost_ones() -> None:
    with mt.autocast("cpu", policy="unified"), mt.autocast("cpu"):
        assert mt.active_policy("cpu").name == "unified"
        with mt.autocast("cpu", policy="fp32"):
            assert mt.active_policy("cpu").name == "fp32"
    with pytest.raises(DeviceError, match="no autocast for device type 'xpu'; allowed are cpu, cuda"):
        mt.active_policy("xpu")


# Regions of TensorPlay's own


def test_a_native_region_inside_is_obeyed() -> None:
    with mt.autocast("cpu"):
        with tp.autocast("cpu", enabled=False):
            assert dtype() == "float32"
            assert not tp.is_autocast_enabled("cpu")
            with mt.autocast("cpu"):
                assert dtype() == "bfloat16"
            assert dtype() == "float32"
        with tp.autocast("cpu", dtype=tp.float16):
            assert dtype() == "float16"
        assert dtype() == "bfloat16"


def test_a_native_region_inside_follows_the_policy_around_it() -> None:
    with mt.autocast("cpu", policy="unified"), tp.autocast("cpu"):
        assert str(tp.softmax(X.bfloat16(), -1).dtype) == "tensorplay.float32"
    with mt.autocast("cpu", policy="fp32"), tp.autocast("cpu"):
        assert dtype() == "float32"


def test_a_native_region_around_is_back_when_the_inner_one_ends() -> None:
    with tp.autocast("cpu", dtype=tp.float16):
        with mt.autocast("cpu", dtype=tp.bfloat16):
            assert dtype() == "bfloat16"
        assert dtype() == "float16"
        with mt.autocast("cpu"):
            assert dtype() == "float16"
        with mt.autocast("cpu", enabled=False):
            assert dtype() == "float32"
        assert tp.is_autocast_enabled("cpu")
        assert dtype() == "float16"
    assert dtype() == "float32"


def test_an_exception_in_a_native_region_inside_leaves_the_outer_state() -> None:
    with mt.autocast("cpu"):
        with pytest.raises(KeyError), tp.autocast("cpu", enabled=False):
            raise KeyError
        assert dtype() == "bfloat16"


def test_a_native_region_that_outlives_the_one_it_was_entered_in_ends_without_a_trace() -> None:
    outer, inner = mt.autocast("cpu"), ExitStack()
    outer.__enter__()
    inner.enter_context(tp.autocast("cpu", enabled=False))
    outer.__exit__()
    inner.close()
    assert dtype() == "float32"
    assert not tp.is_autocast_enabled("cpu")


def test_a_native_region_that_ends_inside_of_mezzos_stays_ended() -> None:
    native, inner = tp.autocast("cpu"), mt.autocast("cpu", tp.float16)
    native.__enter__()
    inner.__enter__()
    native.__exit__(None, None, None)
    assert dtype() == "float16"
    inner.__exit__()
    assert dtype() == "float32"
    assert not tp.is_autocast_enabled("cpu")


def test_a_native_region_entered_again_inside_of_mezzos_leaves_nothing_on() -> None:
    native = tp.autocast("cpu")
    with native, mt.autocast("cpu", enabled=False), native:
        assert dtype() == "bfloat16"
    assert dtype() == "float32"
    assert not tp.is_autocast_enabled("cpu")


# Threads, entries, copies


def test_a_thread_in_a_native_region_keeps_it_while_another_is_in_one_of_mezzos() -> None:
    seen, opened, done = [], threading.Event(), threading.Event()

    def other() -> None:
        with tp.autocast("cpu", dtype=tp.float16):
            opened.wait(20)
            seen.append(dtype())
        seen.append(dtype())
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with mt.autocast("cpu"):
        opened.set()
        assert done.wait(20)
        assert dtype() == "bfloat16"
    thread.join()
    assert seen == ["float16", "float32"]


def test_a_region_is_left_only_by_a_thread_that_entered_it() -> None:
    with pytest.raises(RegionError, match="in a thread that has not entered this region"):
        mt.autocast("cpu").__exit__(None, None, None)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda region: pickle.loads(pickle.dumps(region))])
def test_a_copy_is_a_region_of_its_own(how: object) -> None:
    region = mt.autocast("cpu", tp.float16, policy="unified")
    with region:
        other = how(region)  # type: ignore[operator]
    assert repr(other) == repr(region) == "autocast('cpu', dtype=tensorplay.float16, enabled=True, policy='unified')"
    with other:
        assert dtype() == "float16"
    with pytest.raises(RegionError):
        other.__exit__()


# Decorating


def test_forward_of_a_module_is_decorated() -> None:
    class Net(tp.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = tp.nn.Linear(3, 3)

        @mt.autocast("cpu")
        def forward(self, x: object) -> object:
            """Multiply."""
            return self.layer(x)

    assert str(Net()(X).dtype) == "tensorplay.bfloat16"
    assert Net.forward.__doc__ == "Multiply."


def test_a_decorated_class_computes_in_the_region() -> None:
    @mt.autocast("cpu")
    class Net(tp.nn.Module):
        def forward(self, x: object) -> object:
            return x @ x  # type: ignore[operator]

    assert isinstance(Net, type)
    assert str(Net()(X).dtype) == "tensorplay.bfloat16"


def test_what_cannot_be_decorated_is_said() -> None:
    with pytest.raises(
        TypeError, match=r"requires a callable, but got int\. Did you mean to use autocast as a context"
    ):
        mt.autocast("cpu")(3)
    with pytest.raises(TypeError, match=r"Decorate its forward with mezzo\.tensorplay\.custom_fwd"):
        mt.autocast("cpu")(type("Mine", (tp.autograd.Function,), {}))
    with pytest.raises(TypeError, match="Linear is defined already"):
        mt.autocast("cpu")(tp.nn.Linear)
    with pytest.raises(TypeError, match="nothing to run in the region"):
        mt.autocast("cpu")(type("Empty", (), {}))


def test_a_decorated_generator_computes_in_the_region_and_its_consumer_does_not() -> None:
    @mt.autocast("cpu")
    def produce() -> object:
        yield dtype()
        yield dtype()

    assert [(inside, dtype()) for inside in produce()] == [("bfloat16", "float32")] * 2


def test_decorated_coroutines_do_not_see_each_other() -> None:
    async def body(pause: float) -> list[str]:
        found = [dtype()]
        await asyncio.sleep(pause)
        return [*found, dtype()]

    async def together() -> list[list[str]]:
        low, half = mt.autocast("cpu")(body), mt.autocast("cpu", tp.float16)(body)
        return await asyncio.gather(low(0.01), half(0.0), body(0.005))

    assert asyncio.run(together()) == [["bfloat16"] * 2, ["float16"] * 2, ["float32"] * 2]


@pytest.mark.parametrize("region", [mt.autocast("cpu"), tp.autocast("cpu")], ids=["mezzo", "native"])
def test_autocast_decorator_takes_regions_of_both(region: object) -> None:
    decorated = mt.autocast_decorator(region, dtype)
    assert [decorated(), dtype()] == ["bfloat16", "float32"]


def test_what_is_no_region_and_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"autocast_decorator takes a region such as autocast\('cpu'\) first, got 3"):
        mt.autocast_decorator(3, dtype)
    with pytest.raises(TypeError, match=r"bind\(\) takes a function, got 3"):
        mt.bind(3)  # type: ignore[type-var]
    with pytest.raises(RegionError, match=r"AutocastState.__exit__\(\) was called in a thread that has not entered it"):
        mt.capture().__exit__()


# Carrying


def test_a_bound_function_runs_in_the_state_it_was_bound_in() -> None:
    with mt.autocast("cpu", tp.float16):
        bound, state = mt.bind(dtype), mt.capture()
    seen = []
    thread = threading.Thread(target=lambda: seen.append(bound()))
    thread.start()
    thread.join()
    with mt.autocast("cpu"):
        seen.append(bound())
        with state, state:
            seen.append(dtype())
        seen.append(dtype())
    assert seen == ["float16", "float16", "float16", "bfloat16"]


def test_what_is_bound_outside_of_regions_casts_nothing() -> None:
    bound = mt.bind(dtype)
    with mt.autocast("cpu"):
        assert [bound(), dtype()] == ["float32", "bfloat16"]


def test_what_is_bound_in_a_native_region_runs_in_its_dtype() -> None:
    with tp.autocast("cpu", dtype=tp.float16):
        bound = mt.bind(dtype)
    assert [bound(), dtype()] == ["float16", "float32"]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("decorated", [True, False])
def test_a_reentrant_checkpoint_in_a_region_gives_its_module_gradients(enabled: bool, decorated: bool) -> None:
    """TensorPlay gives them to the parameters that it finds on what it is given, and to no other weights."""
    layer, x = tp.nn.Linear(3, 3), tp.ones(2, 3, requires_grad=True)
    region = mt.autocast("cpu", enabled=enabled)
    with region:
        loss = checkpoint(region(layer) if decorated else layer, x, use_reentrant=True).float().sum()
    loss.backward()
    assert bool((layer.weight.grad == 2.0).all())
    assert bool((layer.bias.grad == 2.0).all())
