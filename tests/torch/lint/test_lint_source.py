"""What `lint` finds in source code: for each kind code that has it, and a near miss."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.report import Finding
from mezzo.torch import set_default_policy
from mezzo.torch.linting.lint import lint
from mezzo.torch.linting.source import source_findings


def found(code: str, dtype: str = "float16") -> list[Finding]:
    return list(source_findings(ast.parse(textwrap.dedent(code)), "net.py", dtype))


def kinds(code: str, dtype: str = "float16") -> list[str]:
    return [finding.kind for finding in found(code, dtype)]


@pytest.mark.parametrize(
    "code",
    [
        "x.masked_fill(mask, -1e9)",
        "x.masked_fill_(mask, value=-1e9)",
        "torch.where(mask, x, -1e10)",
        "torch.full((2,), -1e9)",
        "(1 - mask) * -1e9",
        "(1 - mask) * torch.finfo(torch.float32).min",
        "x - 1e9",
        "x - 1e9 * mask",
        "x - mask * 1e9",
        "x.masked_fill(mask, -10 ** 9)",
    ],
)
def test_a_mask_that_float16_does_not_hold(code: str) -> None:
    assert kinds(code) == ["mask overflow"]


@pytest.mark.parametrize(
    "code",
    [
        "x.masked_fill(mask, -1e4)",
        "x.masked_fill(mask, float('-inf'))",
        "x.masked_fill(mask, torch.finfo(x.dtype).min)",
        "torch.full((2, 2), -1e9, dtype=torch.float32)",
        "x.float() - 1e9",
        "x / 1e9",
        "seconds * 1e9",
        "0 - 1e9 * 2",
        "x.float() - 1e9 * mask",
        "clamp(x, min=-1e9)",
        "steps = 10 * 10000000",
        "with autocast('cpu', enabled=False):\n    x.masked_fill(mask, -1e9)",
    ],
)
def test_a_mask_that_is_kept(code: str) -> None:
    assert kinds(code) == []


def test_bfloat16_holds_what_float16_does_not() -> None:
    assert kinds("x.masked_fill(mask, -1e9)", "bfloat16") == []
    assert kinds("x * torch.finfo(torch.float32).min", "bfloat16") == ["mask overflow"]


@pytest.mark.parametrize(
    "code",
    [
        "torch.log(x + 1e-8)",
        "x / (1e-12 + x.norm())",
        "x.clamp(min=1e-9)",
        "torch.clamp(x, 1e-8, 2.0)",
        "x.clamp(0.0, 1 - 1e-7)",
        "F.normalize(x, dim=-1)",
        "torch.nn.functional.cosine_similarity(x, y)",
    ],
)
def test_an_eps_that_is_lost(code: str) -> None:
    assert kinds(code) == ["eps lost"]


@pytest.mark.parametrize(
    "code",
    [
        "torch.log(x + 1e-4)",
        "torch.log(x.float() + 1e-8)",
        "torch.log(x.to(torch.float32) + 1e-8)",
        "x.clamp(min=1e-4)",
        "x.float().clamp(min=1e-9)",
        "F.normalize(x, eps=1e-4)",
        "F.normalize(x.float(), dim=-1)",
        "normalize(x)",
        "x * 1e-8",
        "x - 1e-8",
        "1e-8 + 1e-9",
        "F.layer_norm(x, (4,), eps=1e-12)",
    ],
)
def test_an_eps_that_is_kept(code: str) -> None:
    assert kinds(code) == []


def test_a_binary_cross_entropy_of_a_sigmoid() -> None:
    assert kinds("F.binary_cross_entropy(torch.sigmoid(x), y)") == ["bce after sigmoid"]
    assert kinds("p = x.sigmoid()\nloss = F.binary_cross_entropy(p, y)") == ["bce after sigmoid"]
    assert kinds("p = softmax(x)\nloss = F.binary_cross_entropy(p, y)") == []
    assert kinds("p = x.sigmoid()\nloss = F.binary_cross_entropy_with_logits(x, y)") == []


def test_a_backward_pass_inside_of_a_region() -> None:
    inside = """
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x)
            loss.backward()
    """
    [finding] = found(inside)
    assert (finding.kind, finding.source.line if finding.source else 0) == ("backward in region", 4)
    assert kinds(inside.replace("            loss.back", "        loss.back")) == []
    assert kinds(inside.replace('"cuda"', '"cuda", enabled=False')) == []
    assert kinds(inside.replace("loss.backward()", "torch.autograd.grad(loss, x)")) == ["backward in region"]
    nested = "with torch.no_grad(), autocast('cpu'):\n    with other():\n        scaler.scale(loss).backward()"
    assert kinds(nested) == ["backward in region"]


def test_a_backward_pass_in_a_function_that_a_region_only_defines() -> None:
    assert kinds("with autocast('cpu'):\n    def later(loss):\n        loss.backward()") == []


REGION = "torch.autocast('cuda', dtype=torch.float16)"


@pytest.mark.parametrize(
    ("before", "entered"),
    [
        (f"ctx = {REGION}", "ctx"),
        (f"self.ctx = {REGION}", "self.ctx"),
        (f"ctx: Any = {REGION}", "no_grad(), ctx as region"),
        (f"scaled, ctx = True, {REGION}", "ctx"),
        (f"ctx = nullcontext() if device == 'cpu' else {REGION}", "ctx"),
        (f"if device == 'cpu':\n    ctx = nullcontext()\nelse:\n    ctx = {REGION}", "ctx"),
        ("amp = partial(torch.autocast, 'cuda', dtype=torch.float16)", "amp()"),
        ("amp = functools.partial(autocast, dtype=torch.float16)", "amp(device_type='cuda')"),
        ("amp = partial(autocast, 'cuda', dtype=torch.bfloat16)", "amp(dtype=torch.float16)"),
        (f"def amp(on):\n    return {REGION}", "amp(True)"),
        (f"def amp(self):\n    return nullcontext() if self.cpu else {REGION}", "self.amp()"),
    ],
)
def test_a_region_that_is_made_elsewhere(before: str, entered: str) -> None:
    code = f"{before}\nwith {entered}:\n    loss = model(x)\n    loss.backward()"
    assert kinds(code) == ["backward in region", "no gradient scaler"]
    assert kinds(code.replace("dtype=torch.float16", "enabled=False, dtype=torch.float16")) == []
    assert kinds(code.replace(f"with {entered}", "with other")) == []


def test_what_is_no_region_by_its_name() -> None:
    for before in ("ctx = nullcontext()", "def ctx():\n    return nullcontext()", "ctx = partial(nullcontext, 1)"):
        assert kinds(f"{before}\nwith ctx, ctx():\n    loss.backward()") == []
    assert kinds("class A:\n    def amp(self): return autocast('cuda')\nwith amp:\n    loss.backward()") == []


LOOP = """
def train(model, optimizer, scaler, data):
    for x in data:
        with torch.autocast("cuda"):
            loss = model(x)
        scaler.scale(loss).backward()
        {unscale}
        {clip}(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize("clip", ["torch.nn.utils.clip_grad_norm_", "clip_grad_value_"])
def test_clipping_before_unscaling(clip: str) -> None:
    [finding] = found(LOOP.format(unscale="pass", clip=clip))
    assert finding.kind == "scaled gradients clipped"
    assert finding.source is not None
    assert (finding.source.line, finding.source.function) == (8, "train")
    assert kinds(LOOP.format(unscale="scaler.unscale_(optimizer)", clip=clip)) == []


BRANCHES = """
def train(model, optimizer, scaler, loss, scaled):
    if scaled:
        scaler.scale(loss).backward()
    else:
        loss.backward()
        {here}
    {behind}
    optimizer.step()
"""


def test_clipping_in_the_branch_that_does_not_scale_is_not_found() -> None:
    clip = "clip_grad_norm_(model.parameters(), 1.0)"
    assert kinds(BRANCHES.format(here=clip, behind="pass")) == []
    assert kinds(BRANCHES.format(here="pass", behind=clip)) == ["scaled gradients clipped"]
    assert kinds(BRANCHES.format(here="pass", behind=f"if scaled:\n        {clip}")) == ["scaled gradients clipped"]


def test_clipping_by_the_scaler_and_without_one() -> None:
    assert kinds(LOOP.format(unscale="pass", clip="scaler.clip_grad_norm_")) == []
    assert kinds("loss.backward()\nclip_grad_norm_(model.parameters(), 1.0)\noptimizer.step()") == []


@pytest.mark.parametrize(
    "code",
    [
        "model = Net().half()\nwith autocast('cuda'):\n    model(x)",
        "model.bfloat16()\nwith autocast('cuda'):\n    model(x)",
        "model = model.to('cuda', torch.float16)\nwith autocast('cuda'):\n    model(x)",
        "self.net = net.to(dtype=torch.bfloat16)\nwith autocast('cuda'):\n    self.net(x)",
    ],
)
def test_a_model_that_is_cast_low_and_called_in_a_region(code: str) -> None:
    assert kinds(code) == ["half model under autocast"]


@pytest.mark.parametrize(
    "code",
    [
        "x = x.half()\nwith autocast('cuda'):\n    model(x)",
        "with autocast('cuda'):\n    model(x.half())",
        "with autocast('cuda'):\n    model(inputs=x.to(torch.bfloat16))",
    ],
)
def test_an_input_that_is_cast_low(code: str) -> None:
    assert kinds(code) == ["half input"]


@pytest.mark.parametrize(
    "code",
    [
        "model = Net().half()\nmodel(x)",
        "model = Net().to('cuda')\nx = x.to('cuda')\nwith autocast('cuda'):\n    model(x)",
        "with autocast('cuda'):\n    y = model(x)\ny = y.half()",
        "with autocast('cuda'):\n    model(x.float())",
        "with autocast('cuda'):\n    p = (model(x) * 3).softmax(-1).half()\n    loss = f(p)",
        "with autocast('cuda'):\n    h = body(x)\n    y = head(h.half())",
    ],
    ids=["no region", "no dtype", "result", "up", "computed at once", "computed before"],
)
def test_casts_that_autocast_does_not_see(code: str) -> None:
    assert kinds(code) == []


def test_a_loss_that_is_given_float16() -> None:
    assert kinds("F.mse_loss(out.half(), y)") == ["float16 loss"]
    assert kinds("loss = F.cross_entropy(out.to(torch.float16), y)") == ["float16 loss"]
    assert kinds("scaler.scale(loss.half()).backward()") == ["float16 loss"]
    assert kinds("F.mse_loss(out.float(), y)") == []
    assert kinds("F.mse_loss(out.half(), y)", "bfloat16") == []


class Attention(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_fill(mask, -1e9).softmax(-1)


def train(model: nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu"):
        model(x).sum().backward()


def safe(x: Tensor) -> Tensor:
    return F.relu(x)


def linted(*args: Any, **options: Any) -> list[Finding]:
    return [finding for finding in lint(*args, device="cpu", **options) if finding.kind != "slow dtype"]


def line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(text))


def test_the_code_of_a_models_classes_is_looked_at_once_with_file_line_and_module() -> None:
    net = nn.ModuleList(nn.ModuleDict({"attn": Attention()}) for _ in range(3))
    [finding] = linted(net)
    assert (finding.kind, finding.path) == ("mask overflow", ("*.attn",))
    assert finding.source is not None
    assert (finding.source.file, finding.source.function) == (__file__, "forward")
    assert finding.source.line == line_of("return x.masked_fill(mask, -1e9)")


def attend(scores: Tensor, mask: Tensor) -> Tensor:
    return masked(scores, mask).softmax(-1)


def masked(scores: Tensor, mask: Tensor) -> Tensor:
    return scores + (1 - mask) * -1e8


def not_called(x: Tensor) -> Tensor:
    return x + 1e-9


class Helped(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return attend(F.relu(x), mask)


def test_functions_that_a_models_code_calls_by_name_are_looked_at_and_others_are_not() -> None:
    [finding] = linted(nn.Sequential(Helped()))
    assert (finding.kind, finding.path) == ("mask overflow", ("0",))
    assert finding.source is not None
    assert finding.source.line == line_of("return scores + (1 - mask) * -1e8")


def test_functions_of_modules_that_a_models_code_names_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lint_helpers.py").write_text("def scale(x):\n    return x + 1e-9\n", encoding="utf-8")
    code = "import lint_helpers\nfrom torch import nn\n\nclass Net(nn.Module):\n    def forward(self, x):\n"
    (tmp_path / "lint_net.py").write_text(code + "        return lint_helpers.scale(x)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    net = importlib.import_module("lint_net").Net()
    [finding] = linted(net)
    assert (finding.kind, finding.path) == ("eps lost", ())
    assert finding.source is not None
    assert finding.source.file == str(tmp_path / "lint_helpers.py")
    assert finding.source.line == 2


def test_a_function_a_class_a_module_and_a_file_are_looked_at(tmp_path: Path) -> None:
    [finding] = linted(source=train)
    assert finding.kind == "backward in region"
    assert finding.source is not None
    assert finding.source.line == line_of("model(x).sum().backward()")
    assert [one.kind for one in linted(source=Attention)] == ["mask overflow"]
    script = tmp_path / "script.py"
    script.write_text(inspect.getsource(train) + "\nfrom missing import nothing\n", encoding="utf-8")
    for source in (script, str(script), [script, safe]):
        assert [one.kind for one in linted(source=source)] == ["backward in region"]
    this = inspect.getmodule(train)
    assert {"backward in region", "mask overflow"} <= {one.kind for one in linted(source=this)}


def test_code_without_a_fault_and_code_of_pytorch_is_not_found() -> None:
    assert linted(source=safe) == []
    assert linted(nn.TransformerEncoderLayer(8, 2, 16)) == []


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def twice(x: Tensor) -> Tensor:
    return (x + 1e-8) / (x * x + 1e-8)


def test_a_default_eps_is_safe_where_a_rule_has_the_norm_in_float32() -> None:
    assert [one.kind for one in linted(source=unit)] == ["eps lost"]
    set_default_policy("unified")
    try:
        assert linted(source=unit) == []
    finally:
        set_default_policy(None)


def test_the_same_twice_in_a_line_is_one_finding() -> None:
    assert [(one.kind, one.count) for one in linted(source=twice)] == [("eps lost", 2)]


def test_a_file_that_is_not_python_is_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def (", encoding="utf-8")
    with pytest.raises(SyntaxError):
        lint(source=script)


def test_a_class_whose_code_is_in_no_file_is_passed_over() -> None:
    namespace: dict[str, Any] = {"nn": nn}
    exec("class Typed(nn.Module):\n    def forward(self, x):\n        return x + 1e-8", namespace)
    assert linted(nn.Sequential(namespace["Typed"]())) == []
