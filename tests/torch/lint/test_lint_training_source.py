"""What `lint` finds in the source of losses and training loops: logarithms of probabilities, and no scaler."""

from __future__ import annotations

import ast
import textwrap

import pytest
import torch
from torch.nn import functional as F

from mezzo.report import Finding
from mezzo.torch.linting.source import source_findings


def found(code: str, dtype: str = "float16", *, softmax_is_wide: bool = False) -> list[Finding]:
    tree = ast.parse(textwrap.dedent(code))
    return list(source_findings(tree, "net.py", dtype, in_float32=lambda op: softmax_is_wide and "softmax" in op))


def kinds(code: str, dtype: str = "float16") -> list[str]:
    return [finding.kind for finding in found(code, dtype)]


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("-torch.log(torch.sigmoid(x))", "F.logsigmoid(logits)"),
        ("x.sigmoid().log()", "F.logsigmoid(logits)"),
        ("torch.log(1 - torch.sigmoid(x))", "F.logsigmoid(-logits)"),
        ("(1 - x.sigmoid()).log()", "F.logsigmoid(-logits)"),
        ("p, q = torch.sigmoid(a), torch.sigmoid(b)\nloss = torch.log(1.0 - q)", "F.logsigmoid(-logits)"),
        ("torch.log(x.softmax(-1))", "F.log_softmax(logits, dim)"),
        ("p = F.softmax(x, -1).half()\ny = torch.log(p)", "F.log_softmax(logits, dim)"),
        ("torch.log(F.softmax(x, -1)[:, 0])", "F.log_softmax(logits, dim)"),
        ("torch.log(nn.Softmax(-1)(x))", "F.log_softmax(logits, dim)"),
    ],
)
def test_a_logarithm_of_a_probability_is_found_with_the_function_to_use(code: str, advice: str) -> None:
    [finding] = found(code)
    assert (finding.kind, finding.advice) == ("log of probabilities", advice)


@pytest.mark.parametrize(
    "code",
    [
        "torch.log(torch.sigmoid(x) + 1e-4)",
        "torch.sigmoid(x).clamp_min(1e-4).log()",
        "torch.log(torch.sigmoid(x.float()))",
        "torch.log(torch.softmax(x, -1, dtype=torch.float32))",
        "F.logsigmoid(x)",
        "torch.log(x)",
        "math.log(2)",
        "logger.log(message)",
        "p = torch.sigmoid(x)\ny = p * torch.log(z)",
        "with torch.autocast('cuda', enabled=False):\n    y = torch.log(torch.sigmoid(x))",
    ],
)
def test_a_logarithm_that_is_safe_or_of_something_else_is_not_found(code: str) -> None:
    assert kinds(code) == []


def test_only_one_minus_a_sigmoid_is_lost_in_bfloat16() -> None:
    assert kinds("torch.log(1 - torch.sigmoid(x))", "bfloat16") == ["log of probabilities"]
    assert kinds("torch.log(torch.sigmoid(x))", "bfloat16") == []
    assert kinds("torch.log(torch.softmax(x, -1))", "bfloat16") == []


def test_a_softmax_that_a_rule_has_in_float32_is_not_found_unless_it_is_rounded() -> None:
    assert found("torch.log(x.softmax(-1))", softmax_is_wide=True) == []
    assert len(found("torch.log(x.softmax(-1).half())", softmax_is_wide=True)) == 1


@pytest.mark.parametrize(("dtype", "end"), [(torch.float16, 8.4), (torch.bfloat16, 6.3)], ids=str)
def test_one_minus_a_sigmoid_is_0_from_the_logit_that_is_told(dtype: torch.dtype, end: float) -> None:
    logits = torch.tensor([end - 0.3, end], dtype=torch.float32).to(dtype)
    assert torch.isinf(torch.log(1 - torch.sigmoid(logits))).tolist() == [False, True]
    assert torch.isfinite(F.logsigmoid(-logits)).all()


def test_a_sigmoid_is_0_in_float16_below_the_logit_that_is_told() -> None:
    logits = torch.tensor([-17.2, -17.4], dtype=torch.float16)
    assert (torch.sigmoid(logits) == 0).tolist() == [False, True]


STEP = """
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "code",
    [STEP, STEP.replace(", dtype=torch.float16", ""), STEP.replace("dtype=torch.float16", "torch.half")],
    ids=["dtype", "the dtype of CUDA", "by place"],
)
def test_a_backward_pass_of_a_float16_region_without_a_scaler_is_found(code: str) -> None:
    [finding] = found(code)
    assert finding.kind == "no gradient scaler"
    assert finding.source is not None
    assert finding.source.line == 4
    assert "scaler.scale(loss).backward()" in finding.advice


@pytest.mark.parametrize(
    "code",
    [
        STEP.replace("loss.backward()", "scaler.scale(loss).backward()"),
        STEP.replace("loss.backward()", "(loss * loss_scale).backward()"),
        STEP.replace("loss.backward()", "amp.scale(loss).backward()"),
        STEP.replace("loss.backward()", "engine.backward(loss)"),
        STEP.replace("float16", "bfloat16"),
        STEP.replace('"cuda", dtype=torch.float16', '"cpu"'),
        STEP.replace("dtype=torch.float16", "dtype=torch.float16, enabled=False"),
        STEP.replace("    loss.backward()\n    optimizer.step()", ""),
        "loss = loss_fn(model(x), y)\nloss.backward()",
    ],
    ids=[
        *("scaler", "by hand", "another name", "a framework", "bfloat16", "the dtype of a CPU", "off", "inference"),
        "float32",
    ],
)
def test_what_is_scaled_or_needs_no_scaler_is_not_found(code: str) -> None:
    assert kinds(code) == []
