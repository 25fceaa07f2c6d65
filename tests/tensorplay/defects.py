"""What native autocast of TensorPlay 1.0 gets wrong, each as a function of the autocast under which it is tried.

``test_defects_native.py`` shows each defect under ``tensorplay.amp``, and ``test_defects_mended*.py`` that
``mezzo.tensorplay`` has none of them. Here is what goes wrong with numbers and gradients (1 to 4); state (5 to 8) is in
``defect_states.py``, and single calls (mixed dtypes, a dtype without a kernel) are in ``defect_calls.py``.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import tensorplay as tp
import tensorplay.nn.functional as F
from tensorplay import nn

LOW = (tp.bfloat16, tp.float16)
LOW_NAMES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Amp:
    """One of the two packages that offer autocast, scaler and decorators of custom functions.

    Args:
        module: ``tensorplay.amp`` or ``mezzo.tensorplay``.
    """

    module: Any

    def region(self, low: Any = tp.bfloat16, **options: Any) -> Any:
        return self.module.autocast("cpu", dtype=low, **options)

    def scaler(self, **options: Any) -> Any:
        return self.module.GradScaler("cpu", **options)


NATIVE = Amp(tp.amp)


def sum_of_gradient(tensor: Any) -> float | None:
    return None if tensor.grad is None else tensor.grad.float().sum().item()


# 1. Norms


def layer_norm_losses(amp: Amp, low: Any, optimizer: str, *, cache: bool = True, steps: int = 40) -> list[float]:
    """Train Linear, LayerNorm, ReLU, Linear on 64 points; ``low`` None is float32. Returns the loss of each step."""
    tp.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))
    rate = {"SGD": 0.5, "AdamW": 0.02}[optimizer]
    stepper = getattr(tp.optim, optimizer)(net.parameters(), lr=rate)
    points, classes = tp.randn(64, 16), tp.randint(0, 4, (64,))
    losses = []
    for _ in range(steps):
        stepper.zero_grad()
        with amp.region(low or tp.bfloat16, enabled=low is not None, cache_enabled=cache):
            loss = F.cross_entropy(net(points), classes)
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses


# 2. Gradients that are lost


def accumulated(amp: Amp, size: int = 17, **options: Any) -> list[float | None]:
    """Sum a weight's gradient over three backward passes in one region: size, 2 size, 3 size where none is lost."""
    weight, ones, seen = tp.ones(size, 1).requires_grad_(), tp.ones(1, size), []
    with amp.region(**options):
        for _ in range(3):
            (ones @ weight).sum().backward()
            seen.append(sum_of_gradient(weight))
    return seen


def two_losses(amp: Amp, *, inside: bool, size: int = 17) -> list[float | None]:
    """Run two forward passes over one weight before either backward pass, which run inside the region or after it."""
    weight, ones, seen = tp.ones(size, 1).requires_grad_(), tp.ones(1, size), []
    region = amp.region()
    with region:
        losses = [(ones @ weight).sum(), (ones @ weight).sum()]
        if inside:
            for loss in losses:
                loss.backward()
                seen.append(sum_of_gradient(weight))
    if not inside:
        for loss in losses:
            loss.backward()
            seen.append(sum_of_gradient(weight))
    return seen


def second_grad(amp: Amp) -> list[bool]:
    """Ask ``autograd.grad`` twice in one region, each time after a forward pass of its own: is there an answer?"""
    weight, ones, seen = tp.ones(17, 1).requires_grad_(), tp.ones(1, 17), []
    with amp.region():
        for _ in range(2):
            (gradient,) = tp.autograd.grad((ones @ weight).sum(), [weight], allow_unused=True)
            seen.append(gradient is not None)
    return seen


def steps_after_a_skip(amp: Amp) -> list[tuple[float, bool]]:
    """Take three steps in one open region, the first with infinite gradients. Returns scale and "has a gradient"."""
    tp.manual_seed(0)
    layer = nn.Linear(17, 1, bias=False)
    stepper = tp.optim.SGD(layer.parameters(), lr=0.1)
    scaler, seen = amp.scaler(init_scale=2.0**16), []
    with amp.region(tp.float16):
        for factor in (1e6, 1.0, 1.0):
            stepper.zero_grad()
            loss = layer(tp.ones(1, 17)).float().sum() * factor
            scaler.scale(loss).backward()
            scaler.step(stepper)
            scaler.update()
            seen.append((scaler.get_scale(), layer.weight.grad is not None))
    return seen


def gradient_after_unfreezing(amp: Amp) -> float | None:
    """Use a frozen weight, then unfreeze it in the same region: the next product is to have a gradient."""
    weight, ones = tp.ones(17, 1), tp.ones(1, 17)
    with amp.region():
        ones @ weight
        weight.requires_grad_()
        product = (ones @ weight).sum()
    if product.requires_grad:
        product.backward()
    return sum_of_gradient(weight)


def masked_encoder_gradients(amp: Amp, low: Any, *, enabled: bool = True) -> list[Any]:
    """Give the gradients of an encoder layer whose attention has a mask, in the order of its parameters."""
    tp.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    tokens = tp.randn(3, 2, 8)
    mask = tp.tensor([[0.0, -9.0, -9.0], [0.0, 0.0, -9.0], [0.0, 0.0, 0.0]])
    with amp.region(low, enabled=enabled):
        result = layer(tokens, src_mask=mask)
    (result.float() * tp.arange(8)).sum().backward()
    return [parameter.grad for parameter in layer.parameters()]


# 3. The first `Function.apply` of a process

FIRST_APPLY = """
import sys
import tensorplay as tp
amp = __import__(sys.argv[1], fromlist=["autocast"])

class Double(tp.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2

first = tp.nn.Parameter(tp.ones(2)) if sys.argv[2] == "parameter" else tp.ones(2).requires_grad_()
results = [Double.apply(x) for x in (first, tp.ones(2).requires_grad_(), tp.nn.Parameter(tp.ones(2)))]
print([result.requires_grad for result in results])
"""


def run_python(program: str, *arguments: str) -> str:
    """Run a program in a process of its own and give what it prints, without the line break at the end."""
    command = [sys.executable, "-W", "error", "-c", program, *arguments]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, f"the child ended with {run.returncode}: {run.stdout}\n{run.stderr}"
    return run.stdout.strip()


def first_apply(amp: Amp, first: str) -> str:
    """Apply a custom function in a new process, to ``first``, a plain tensor and a parameter.

    Args:
        amp: the package to import.
        first: ``"parameter"`` or ``"tensor"``.

    Returns:
        Whether each of the three results requires a gradient, as text.
    """
    return run_python(FIRST_APPLY, amp.module.__name__, first)


# 4. Twice differentiable


def gradient_penalty(amp: Amp, low: Any, *, enabled: bool = True) -> list[Any]:
    """Give the penalty on the norm of a critic's gradient, and the gradients of its two weights.

    The critic is smooth by exp: TensorPlay's tanh, relu and the like are not differentiable twice in float32 either.
    """
    tp.manual_seed(0)
    first, second, points = nn.Linear(8, 16), nn.Linear(16, 1), tp.randn(32, 8).requires_grad_()
    with amp.region(low, enabled=enabled):
        score = second(tp.exp(first(points))).sum()
        (slope,) = tp.autograd.grad(score, [points], create_graph=True)
        penalty = ((slope.pow(2).sum(1) + 1e-6).sqrt() - 1).pow(2).mean()
    penalty.backward()
    return [penalty.detach(), first.weight.grad, second.weight.grad]


def second_gradient_through_a_cast() -> float:
    """Differentiate twice through a cast by hand, without a region: the weight's gradient is to be 64."""
    weight, ones = tp.ones(16, 1).requires_grad_(), tp.ones(1, 16).requires_grad_()
    result = (ones @ weight).to(tp.bfloat16).to(tp.float32).pow(2).sum()
    (slope,) = tp.autograd.grad(result, [ones], create_graph=True)
    slope.sum().backward()
    return weight.grad[0, 0].item()


def hessian(amp: Amp, *, by_hand: bool, enabled: bool = True) -> list[float]:
    """Give the second derivatives of the sum of squares of a product, which are 4 or 0, as a flat list.

    Args:
        amp: whose autocast.
        by_hand: whether the product is cast to float32 in the function, as losses often are.
        enabled: False computes in float32.
    """

    def squares(weight: Any) -> Any:
        product = tp.ones(2, 2) @ weight
        return ((product.float() if by_hand else product) ** 2).sum()

    with amp.region(enabled=enabled):
        found = tp.func.hessian(squares)(tp.ones(2, 2))
    return found.float().reshape(16).tolist()
