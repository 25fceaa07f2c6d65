"""What `lint` makes of names in source code: constants that they stand for, and values that are safe."""

from __future__ import annotations

import ast
import textwrap

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch.linting.lint import lint
from mezzo.torch.linting.source import source_findings

EPS, NEGATIVE, KEPT = 1e-8, -1e9, 1e-4


def kinds(code: str, dtype: str = "float16") -> list[str]:
    found = source_findings(ast.parse(textwrap.dedent(code)), "net.py", dtype)
    return [finding.kind for finding in found]


@pytest.mark.parametrize(
    ("lost", "kept"),
    [
        ("x += 1e-8", "x += 1e-4"),
        ("x = x.add(1e-8)", "x = x.add(1e-4)"),
        ("x.add_(1e-8)", "x.float().add_(1e-8)"),
        ("y = torch.add(x, 1e-8)", "y = torch.add(x.float(), 1e-8)"),
        ("y = torch.add(x, other=1e-8)", "y = torch.add(x, x, alpha=1e-8)"),
        ("def f(x, eps=1e-8):\n    return x + eps", "def f(x, eps=1e-4):\n    return x + eps"),
        ("def f(x, *, eps=1e-8):\n    return x + eps", "def f(x, *, eps=1e-8):\n    eps = 1e-4\n    return x + eps"),
        (
            "def f(x):\n    eps = 1e-8\n    return x + eps",
            "def f(x):\n    eps = 1e-8\n    eps = g()\n    return x + eps",
        ),
        ("EPS = 1e-8\ndef f(x):\n    return x + EPS", "EPS = 1e-8\ndef f(x, EPS):\n    return x + EPS"),
        (
            "EPS = 1e-8\ndef f(x):\n    return x.clamp(min=EPS)",
            "EPS = 1e-8\nEPS = g()\ndef f(x):\n    return x.clamp(EPS)",
        ),
        (
            "class A:\n    EPS = 1e-8\n    def f(s, x):\n        return x + s.EPS",
            "class A:\n    EPS = 1e-8\n    def f(s, x):\n        s.EPS = g()\n        return x + s.EPS",
        ),
        (
            "class A:\n    EPS = 1e-8\n    def f(self, x):\n        return x + A.EPS",
            "class A:\n    EPS = 1e-8\n    def f(self, x, other):\n        return x + other.EPS",
        ),
    ],
)
def test_a_small_number_that_is_added_is_found_however_it_is_written(lost: str, kept: str) -> None:
    assert kinds(lost) == ["eps lost"]
    assert kinds(kept) == []


@pytest.mark.parametrize(
    ("lost", "kept"),
    [
        ("x[mask] = -1e9", "x[mask] = -1e4"),
        ("x[:, 0] = -1e9", "x = x.float()\nx[:, 0] = -1e9"),
        ("x[mask] = float('-1e9')", "x[mask] = float('-inf')"),
        ("x[i] = -100000", "x = x.long()\nx[i] = -100000"),
        ("x[i] = -1e9", "x['loss'] = -1e9"),
        ("x[i] = -1e9", "x = [0.0] * 3\nx[i] = -1e9"),
        ("x -= 1e9", "x -= 1e-8"),
        ("x -= 1e9", "self.total -= 1e9"),
        ("x[0] -= 1e9", "x[0] = 1e9"),
        ("x.sub(1e9)", "x.double().sub(1e9)"),
        ("x.mul(-1e9)", "x.mul(1e9)"),
        ("x.masked_fill(m, float('-1e9'))", "x.float().masked_fill(m, -1e9)"),
        ("torch.where(m, x, torch.tensor(-1e9))", "torch.where(m, x.float(), torch.tensor(-1e9))"),
        ("torch.where(m, x, -1e9)", "torch.where(m, 100000, 0)"),
        ("torch.full((3,), -1e9)", "torch.full((3,), -100000, dtype=torch.long)"),
        (
            "NEG = -1e9\ndef f(x, m):\n    return x.masked_fill(m, NEG)",
            "def f(x, m):\n    return x.masked_fill(m, NEG)",
        ),
    ],
)
def test_a_mask_is_found_however_it_is_written(lost: str, kept: str) -> None:
    assert kinds(lost) == ["mask overflow"]
    assert kinds(kept) == []


@pytest.mark.parametrize(
    ("safe", "lost"),
    [
        ("h = x.float()\ny = h + 1e-8", "h = x.half()\ny = h + 1e-8"),
        ("h = x.double() * 3\ny = h + 1e-12", "y = h + 1e-12\nh = x.double() * 3"),
        (
            "h = x.to(torch.float32)\nv = h.pow(2).mean(-1, keepdim=True)\ny = torch.rsqrt(v + 1e-8)",
            "y = torch.rsqrt(v + 1e-8)",
        ),
        ("p = y.float().softmax(-1)\ny = p + 1e-12", "p = y.softmax(-1)\ny = p + 1e-12"),
        ("h = x.float()\nh += 1e-8", "h = x.float()\nh = h.to(dtype)\nh += 1e-8"),
        ("h = x.float()\ny = F.relu(h) + 1e-8", "h = x.float()\ny = F.linear(h, w) + 1e-8"),
        ("h = x.float()\ny = (h * h) + 1e-8", "h = x.float()\ny = (h @ h) + 1e-8"),
        ("h = x.float()\ny = h.clamp(min=1e-8)", "h = x.float()\nh = net(h)\ny = h.clamp(min=1e-8)"),
        ("y = torch.rand(3) + 1e-9", "y = torch.rand(3, dtype=x.dtype) + 1e-9"),
        ("y = x.sum().item() + 1e-8", "y = x.sum() + 1e-8"),
        ("y = math.sqrt(2.0) + 1e-9", "y = torch.sqrt(x) + 1e-9"),
        ("t = time.time()\ny = time.time() - t + 1e-9", "y = x.time() + 1e-9"),
        ("y = np.std(a) + 1e-9", "y = torch.std(a) + 1e-9"),
        ("n = 0\ny = n + 1e-9", "n = net(x)\ny = n + 1e-9"),
        ("def f(n: int):\n    return n + 1e-9", "def f(n: Tensor):\n    return n + 1e-9"),
        (
            "@torch.amp.custom_fwd(cast_inputs=torch.float32, device_type='cuda')\ndef f(x):\n    return x + 1e-8",
            "@torch.amp.custom_fwd(device_type='cuda')\ndef f(x):\n    return x + 1e-8",
        ),
        (
            "@torch.autocast('cuda', enabled=False)\ndef f(x):\n    return x + 1e-8",
            "@torch.autocast('cuda')\ndef f(x):\n    return x + 1e-8",
        ),
    ],
)
def test_a_number_added_to_what_is_safe_is_not_found(safe: str, lost: str) -> None:
    assert kinds(safe) == []
    assert kinds(lost) == ["eps lost"]


@pytest.mark.parametrize("integer", ["len(x)", "x.long().sum()", "x.size(0)", "x.shape[0]", "int(x)"])
def test_large_integers_are_no_masks(integer: str) -> None:
    assert kinds(f"y = {integer} - 1000000") == []
    assert kinds("y = x - 1000000") == ["mask overflow"]


def test_a_logarithm_of_a_probability_in_float32_is_not_found() -> None:
    assert kinds("h = x.float()\np = torch.sigmoid(h)\ny = torch.log(p)") == []
    assert kinds("h = net(x.float())\np = torch.sigmoid(h)\ny = torch.log(p)") == ["log of probabilities"]


class Named(nn.Module):
    SMALL = 1e-9

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x + EPS).masked_fill(mask, NEGATIVE) + self.SMALL + KEPT


def test_names_of_the_module_that_a_class_is_in_are_looked_up() -> None:
    for found in (
        lint(Named(), device="cpu"),
        lint(source=Named, device="cpu"),
        lint(source=Named.forward, device="cpu"),
    ):
        messages = " ".join(finding.message for finding in found if finding.kind != "slow dtype")
        assert "1e-08 is added" in messages
        assert "masked_fill has the constant -1e+09" in messages
        assert "0.0001" not in messages
    assert sum("1e-09 is added" in finding.message for finding in lint(Named(), device="cpu")) == 1
    with pytest.raises(RuntimeError, match="overflow"):  # why it matters
        Named()(torch.ones(2).half(), torch.tensor([True, False]))
