"""What registering does to calls on a device: every rule, the guide's own small backend, and tables that are replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mezzo
import mezzo.torch
from mezzo.torch import accelerator_policy, policies, register_accelerator, register_kernel

NAME = "standin"
LOW = [torch.float16, torch.bfloat16]
REGIONS = {"torch": torch.autocast, "mezzo": mezzo.torch.autocast}
GUIDE = mezzo.Policy("guide", {"mm.default": "lower_precision_fp", "asin": "fp32", "binary_cross_entropy": "banned"})


@pytest.fixture(autouse=True)
def _the_reference_list_is_back() -> Iterator[None]:
    register_accelerator(NAME, dtypes=LOW)
    yield
    register_accelerator(NAME, dtypes=LOW)


@pytest.fixture(params=REGIONS.values(), ids=REGIONS)
def region(request: pytest.FixtureRequest) -> type[torch.autocast]:
    return request.param  # type: ignore[no-any-return]


def on_device(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(0.1, 0.9, torch.Size(sizes).numel()).reshape(sizes).to(NAME, dtype)


def product(x: torch.Tensor) -> torch.dtype:
    return torch.mm(x, x).dtype


def test_the_small_backend_of_the_guide(region: type[torch.autocast]) -> None:
    register_accelerator(NAME, dtypes=LOW, policy=GUIDE)
    x = on_device(3, 3)
    with region(NAME):
        low = torch.mm(x, x)
        assert low.dtype is torch.float16
        assert torch.equal(low.cpu(), torch.mm(x.cpu().half(), x.cpu().half()))
        wide = torch.asin(x.half())
        assert wide.dtype is torch.float32
        assert torch.equal(wide.cpu(), torch.asin(x.cpu().half().float()))
        with pytest.raises(RuntimeError, match=r"binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast"):
            torch.nn.functional.binary_cross_entropy(x, x)
        # All else runs as it comes.
        assert torch.bmm(x[None], x[None]).dtype is torch.float32
        assert torch.exp(x.half()).dtype is torch.float16
    with region(NAME, dtype=torch.bfloat16):
        assert product(x) is torch.bfloat16
    assert product(x) is torch.float32


def test_each_cast_policy_of_the_guide_kernel_by_kernel(region: type[torch.autocast]) -> None:
    register_accelerator(NAME, dtypes=LOW, policy=mezzo.Policy("nothing"))
    x, half = on_device(3, 3), on_device(3, 3).half()
    with region(NAME):
        assert product(x) is torch.float32
    register_kernel(NAME, "aten::mm", "lower_precision_fp")
    register_kernel(NAME, "aten::asin", "fp32")
    register_kernel(NAME, "aten::sum.dim_IntList", "fp32_set_opt_dtype")
    register_kernel(NAME, "aten::norm.Scalar", "fp32_append_dtype")
    register_kernel(NAME, "aten::norm.ScalarOpt_dim", "fp32_append_dtype")
    register_kernel(NAME, "aten::cat", "promote")
    register_kernel(NAME, "aten::tanh", "banned")
    norm = torch.ops.aten.norm
    with region(NAME):
        assert product(x) is torch.float16
        assert torch.asin(half).dtype is torch.float32
        assert torch.sum(half, 1).dtype is torch.float32
        assert torch.sum(half, 1, dtype=torch.float16).dtype is torch.float16
        assert torch.sum(half).dtype is torch.float16  # another overload
        assert norm.Scalar(half, 2).dtype is norm.ScalarOpt_dim(half, 2, [1]).dtype is torch.float32
        wide = norm.ScalarOpt_dim(half, 2, [1], True)
        assert torch.cat([x, half]).dtype is torch.float32
        assert torch.cat([half, half]).dtype is torch.float16
        with pytest.raises(mezzo.BannedOpError, match="aten::tanh is banned by the policy 'nothing'"):
            torch.tanh(x)
    assert torch.equal(wide.cpu(), norm.ScalarOpt_dim_dtype(half.cpu(), 2, [1], True, dtype=torch.float32))


def test_a_rule_may_differ_between_the_dtypes_and_be_changed_again(region: type[torch.autocast]) -> None:
    x = on_device(2, 2)
    register_kernel(NAME, "exp", {"float16": "fp32", "bfloat16": "fallthrough"})
    for dtype, wanted in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        with region(NAME, dtype=dtype):
            assert torch.exp(x.to(dtype)).dtype is wanted
    register_kernel(NAME, "exp", "lower_precision_fp")
    with region(NAME):
        assert torch.exp(x).dtype is torch.float16
    register_kernel(NAME, "exp", "fallthrough")
    with region(NAME):
        assert torch.exp(x).dtype is torch.float32


def test_a_custom_op_can_have_a_rule(region: type[torch.autocast]) -> None:
    with torch.library._scoped_library("mezzo_accelerator_test", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x + x, "CompositeExplicitAutograd")
        register_kernel(NAME, "mezzo_accelerator_test::double", "lower_precision_fp")
        with region(NAME):
            assert torch.ops.mezzo_accelerator_test.double(on_device(2)).dtype is torch.float16
        register_accelerator(NAME, dtypes=LOW)
        with region(NAME):
            assert torch.ops.mezzo_accelerator_test.double(on_device(2)).dtype is torch.float32


def test_the_base_name_of_a_custom_op_is_for_all_of_its_overloads() -> None:
    with torch.library._scoped_library("mezzo_overloads_test", "DEF") as library:
        for overload in ("one", "other"):
            library.define(f"double.{overload}(Tensor x) -> Tensor")
            library.impl(f"double.{overload}", lambda x: x + x, "CompositeExplicitAutograd")
        register_kernel(NAME, "mezzo_overloads_test::double.one", "lower_precision_fp")
        register_kernel(NAME, "mezzo_overloads_test::double", "fallthrough")
        ops = torch.ops.mezzo_overloads_test.double
        for op in (ops.one, ops.other):
            with torch.autocast(NAME):
                assert op(on_device(2)).dtype is torch.float32
        register_kernel(NAME, "mezzo_overloads_test::double.other", "lower_precision_fp")
        assert accelerator_policy(NAME).rule("mezzo_overloads_test::double.other") == "lower_precision_fp"
        with torch.autocast(NAME):
            assert ops.one(on_device(2)).dtype is torch.float32
            assert ops.other(on_device(2)).dtype is torch.float16
        register_accelerator(NAME, dtypes=LOW)


def test_what_was_made_before_follows_a_table_that_is_replaced() -> None:
    x = on_device(2, 2)
    regions = [mezzo.torch.autocast(NAME), mezzo.torch.autocast(NAME, policy="torch"), torch.autocast(NAME)]
    regions += [mezzo.torch.autocast(NAME, policy=mezzo.Policy("mine", {"exp": "fp32"}, default="device"))]
    decorated = [each(product) for each in regions]
    with mezzo.torch.autocast(NAME):
        bound = mezzo.torch.bind(product)
    compiled = torch.compile(lambda x: torch.mm(x, x), backend="aot_eager", fullgraph=True)
    with FakeTensorMode() as mode:  # for Dynamo, which knows no tensors like the stand-in's
        fake = torch.empty(2, 2, device=NAME)

    def found() -> set[torch.dtype]:
        dtypes = {function(x) for function in [*decorated, bound]}
        for each in regions:
            with each:
                dtypes.add(product(x))
            with mode, each:
                dtypes.add(compiled(fake).dtype)
        return dtypes

    assert found() == {torch.float16}
    register_accelerator(NAME, dtypes=LOW, policy="fp32")
    assert found() == {torch.float32}
    register_kernel(NAME, "mm.default", "lower_precision_fp")
    assert found() == {torch.float16}
    register_accelerator(NAME, dtypes=LOW, policy=mezzo.Policy("nothing"))
    assert found() == {torch.float32}
    register_accelerator(NAME, dtypes=LOW)
    assert found() == {torch.float16}


def test_a_table_is_for_all_threads() -> None:
    x, found = on_device(2, 2), []

    def work() -> None:
        for region in REGIONS.values():
            with region(NAME):
                found.append(product(x))

    for policy in ("reference", "fp32"):
        register_accelerator(NAME, dtypes=LOW, policy=policy)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [torch.float16, torch.float16, torch.float32, torch.float32]


def test_policies_of_regions_and_of_the_process_come_before_the_table() -> None:
    x = on_device(2, 2)
    half = x.half()
    with mezzo.torch.autocast(NAME, policy="fp32"):
        assert product(x) is torch.float32
        with mezzo.torch.autocast(NAME, policy="torch"):
            assert product(x) is torch.float16
    # Not listed by the policy, so it falls through, though the table lists it.
    with mezzo.torch.autocast(NAME, policy=mezzo.Policy("mine", {"mm": "lower_precision_fp"})):
        assert torch.exp(half).dtype is torch.float16
    with mezzo.torch.autocast(NAME, policy="torch"):
        assert torch.exp(half).dtype is torch.float32
    mezzo.torch.set_default_policy("fp32")
    with torch.autocast(NAME):
        assert product(x) is torch.float32
    assert mezzo.torch.active_policy(NAME).name == "fp32"
    register_kernel(NAME, "mm.default", "lower_precision_fp")
    with torch.autocast(NAME):
        assert product(x) is torch.float32
    mezzo.torch.set_default_policy(None)
    with torch.autocast(NAME):
        assert product(x) is torch.float16


def test_only_regions_of_mezzo_have_repairs() -> None:
    x = on_device(2, 2)
    register_accelerator(NAME, dtypes=LOW, policy=mezzo.builtin_policy("unified"))
    assert mezzo.builtin_policy("unified").repairs
    assert not accelerator_policy(NAME).repairs
    with torch.autocast(NAME), pytest.raises(RuntimeError, match="same dtype"):
        torch.mm(x.double(), x)
    with mezzo.torch.autocast(NAME):
        assert torch.mm(x.double(), x).dtype is torch.float64


def test_a_default_in_place_of_a_list(region: type[torch.autocast]) -> None:
    register_accelerator(NAME, dtypes=LOW, policy=mezzo.Policy("wide", {"mm": "lower_precision_fp"}, default="fp32"))
    half = on_device(2, 2).half()
    with region(NAME):
        assert torch.sin(half).dtype is torch.float32
        assert torch.mm(half, half).dtype is torch.float16
        assert half.clone().dtype is torch.float16


def test_regions_of_a_wider_dtype_where_the_backend_allows_one() -> None:
    x = on_device(2, 2)
    register_accelerator(NAME, dtypes=[*LOW, torch.float32])
    for region in REGIONS.values():
        with region(NAME, dtype=torch.float32):
            assert product(x.half()) is torch.float32
    register_accelerator(NAME, dtypes=LOW)
    for region in REGIONS.values():
        with pytest.warns(UserWarning, match="standin Autocast only supports dtypes of torch.float16, torch.bfloat16"):
            disabled = region(NAME, dtype=torch.float32)
        with disabled:
            assert product(x) is torch.float32


def test_observers_and_module_precisions_see_the_device() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(NAME)
    mezzo.torch.set_precision(net, {"1": "fp32"})
    x = on_device(2, 2)
    with mezzo.torch.observe(NAME) as seen, mezzo.torch.autocast(NAME):
        assert net[0](x).dtype is torch.float16
        assert net(x).dtype is torch.float32
    assert [(call.op, call.output_dtype) for call in seen.calls] == [
        ("aten::linear", "float16"),
        ("aten::linear", "float16"),
        ("aten::linear", "float32"),
    ]
    with mezzo.torch.observe(NAME) as seen, torch.autocast(NAME):
        torch.mm(x, x)
    assert [(call.op, call.casts) for call in seen.calls] == [("aten::mm", 2)]


def test_the_accelerator_and_the_cpu_in_one_region() -> None:
    x, y = on_device(2, 2), torch.ones(2, 2)
    assert torch.accelerator.current_accelerator().type == NAME
    with mezzo.torch.autocast("auto"):
        assert product(x) is torch.float16
        assert product(y) is torch.bfloat16
    with torch.autocast("cpu"):
        assert product(x) is torch.float32
    with torch.autocast(NAME):
        assert product(y) is torch.float32


def test_code_is_traced_by_the_table_through_higher_order_ops_too(region: type[torch.autocast]) -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        cond = torch.ops.higher_order.cond
        return cond(x.sum() > 0, lambda x: torch.mm(x, x), lambda x: x.half(), (x,)).softmax(-1)

    with FakeTensorMode():
        x = torch.empty(2, 2, device=NAME)
        with region(NAME):
            graph = make_fx(branches)(x)
    casts = [node.kwargs["dtype"] for node in graph.true_graph_0.graph.nodes if "_to_copy" in str(node.target)]
    assert casts == [torch.float16, torch.float16]
    assert [node.kwargs["dtype"] for node in graph.graph.nodes if "_to_copy" in str(node.target)] == [torch.float32]


def test_a_refused_call_changes_nothing() -> None:
    x, before = on_device(2, 2), accelerator_policy(NAME)
    for arguments in (
        {"dtypes": LOW, "policy": "torch"},
        {"dtypes": [torch.bfloat16]},
        {"dtypes": LOW, "policy": mezzo.Policy("x", {"nolib::op": "fp32"})},
        {"dtypes": LOW, "policy": mezzo.Policy("x", {"aten::mm": "fp32", "mezzo_nolib::op": "fp32"})},
        {"dtypes": [torch.int32]},
    ):
        with pytest.raises(mezzo.MezzoError):
            register_accelerator(NAME, **arguments)  # type: ignore[arg-type]
    for op, rule in (("mm", "fp32_set_opt_dtype"), ("nothing", "fp32"), ("mm", "wide"), ("higher_order::cond", "fp32")):
        with pytest.raises(mezzo.MezzoError):
            register_kernel(NAME, op, rule)
    assert accelerator_policy(NAME) is before
    assert torch.standin.get_amp_supported_dtype() == LOW
    with torch.autocast(NAME):
        assert product(x) is torch.float16


def test_regions_with_new_policies_may_be_made_while_a_table_is_replaced() -> None:
    stop, failed, made = threading.Event(), [], []

    def make() -> None:
        for count in range(60):
            if stop.wait(0.001):
                break
            policy = mezzo.Policy(f"made {count}", {"exp": "fp32"}, default="device", repairs=False)
            try:
                made.append(mezzo.torch.autocast(NAME, policy=policy))
            except RuntimeError as error:
                failed.append(error)

    maker = threading.Thread(target=make)
    register_accelerator(NAME, dtypes=LOW, policy=GUIDE)
    maker.start()
    try:
        while maker.is_alive():
            register_kernel(NAME, "mm.default", "fp32")
            register_kernel(NAME, "mm.default", "lower_precision_fp")
            time.sleep(0.001)  # or this thread would have the lock most of the time
    finally:
        stop.set()
        maker.join()
    assert failed == []
    assert len(made) == 60
    # Asked without entering them: each has a policy of its own, and compiled code can tell few.
    rules = {region._active.plan.float16["aten::mm"].rule for region in made}
    assert rules == {mezzo.CastPolicy.LOWER_PRECISION_FP}
    for region in REGIONS.values():
        with region(NAME):
            assert product(on_device(2, 2)) is torch.float16


def test_composite_ops_of_the_table_are_repaired_too() -> None:
    x = on_device(4, 4)
    wide = x.double()
    with mezzo.torch.autocast(NAME):
        assert torch.nn.functional.layer_norm(x, (4,), wide[0]).dtype is torch.float64
    register_accelerator(NAME, dtypes=LOW, policy=mezzo.Policy("mine", {"einsum": "promote"}))
    with mezzo.torch.autocast(NAME):
        product = torch.einsum("ij,jk->ik", x, wide)
    assert product.dtype is torch.float64
    assert torch.equal(product.cpu(), x.cpu().double() @ wide.cpu())


def test_no_policy_is_put_in_force_in_the_midst_of_a_replacement() -> None:
    """The lock under which a table is replaced: a plan made meanwhile would be of the old one, and be missed."""
    policy = mezzo.Policy("waits", {"cos": "fp32"}, default="device")
    thread = threading.Thread(target=lambda: mezzo.torch.autocast(NAME, policy=policy))
    with policies._lock:
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
    thread.join(30)
    assert not thread.is_alive()
