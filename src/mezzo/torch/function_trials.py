"""Trying a custom autograd function out: which mixes of dtypes, where the backward pass runs, and what counts as wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mezzo.torch.autocast import autocast
from mezzo.torch.casting import ELIGIBLE, dtype_name

__all__ = ["Apply", "Check", "Trial", "first_line"]

Apply = Callable[..., Any]


@dataclass(frozen=True)
class Trial:
    """One run of a function, forward in a region.

    Attributes:
        inputs: The dtype names of its eligible tensors.
        backward: Where the backward pass ran: ``"after the region"`` or ``"in the region"``.
        fault: What went wrong; empty if nothing did.
    """

    inputs: tuple[str, ...]
    backward: str
    fault: str

    def __str__(self) -> str:
        return f"inputs {', '.join(self.inputs)}; backward {self.backward}: {self.fault or 'right'}"


Dtypes = tuple[torch.dtype, ...]
"""One dtype for each eligible tensor of the example."""

Result = dict[str, Tensor | None]
"""Outputs and gradients by what they are called in messages."""


class Check:
    """The example and the regions it is tried in."""

    def __init__(
        self,
        args: tuple[Any, ...],
        device_type: str,
        region: Callable[[], autocast],
        low: torch.dtype,
        tolerance: float,
    ) -> None:
        self.leaves, self.spec = pytree.tree_flatten(args)
        self.device_type, self.region, self.low, self.tolerance = device_type, region, low, tolerance
        self.places = [
            place
            for place, leaf in enumerate(self.leaves)
            if isinstance(leaf, Tensor) and leaf.dtype in ELIGIBLE and leaf.device.type == device_type
        ]
        asked = [leaf.requires_grad for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.all_need_gradients = not any(asked)
        self.cuda = sorted({leaf.device.index for leaf in self.leaves if isinstance(leaf, Tensor) and leaf.is_cuda})
        self.references: dict[Dtypes, Result] = {}

    def off(self) -> autocast:
        """Make a region without autocast."""
        return autocast(self.device_type, enabled=False)

    def make_references(self, apply: Apply) -> None:
        """Run every mix of dtypes without autocast, in float32."""
        for dtypes in self._mixes():
            self.references[dtypes] = self._run(apply, dtypes, self.off, self.off, widened=True)

    def trials(self, apply: Apply) -> tuple[Trial, ...]:
        """Run every mix of dtypes in a region, each with the backward pass after it and in it."""
        return tuple(
            Trial(tuple(map(dtype_name, dtypes)), where, self._fault(apply, dtypes, region))
            for dtypes in self.references
            for where, region in (("after the region", self.off), ("in the region", self.region))
        )

    def _mixes(self) -> list[Dtypes]:
        full, count = torch.float32, len(self.places)
        if count <= 3:
            return list(itertools.product((full, self.low), repeat=count))
        # With many tensors: all, none, and each alone in either precision.
        alone = [
            tuple(one if place == index else other for place in range(count))
            for one, other in ((self.low, full), (full, self.low))
            for index in range(count)
        ]
        return [(full,) * count, (self.low,) * count, *alone]

    def _fault(self, apply: Apply, dtypes: Dtypes, backward: Callable[[], autocast]) -> str:
        try:
            result = self._run(apply, dtypes, self.region, backward)
        except Exception as error:  # noqa: BLE001 - whatever the function raises is what is asked for
            return first_line(error)
        for name, expected in self.references[dtypes].items():
            fault = _difference(result.get(name), expected, self.tolerance)
            if fault:
                return f"{name} {fault}"
        return ""

    def _run(
        self,
        apply: Apply,
        dtypes: Dtypes,
        forward: Callable[[], autocast],
        backward: Callable[[], autocast],
        *,
        widened: bool = False,
    ) -> Result:
        """Run the function forward and backward, with its eligible tensors in the given dtypes.

        Widened, the tensors have the values that they have in these dtypes, but are float32.
        """
        leaves = self._tensors(dtypes, widened)
        needing = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad}
        # Copies of the leaves, so that a function may write into its inputs.
        passed = [leaf.clone() if place in needing else leaf for place, leaf in enumerate(leaves)]
        with torch.random.fork_rng(devices=self.cuda):
            torch.manual_seed(0)
            with forward():
                output = apply(*pytree.tree_unflatten(passed, self.spec))
            outputs = [one for one in pytree.tree_leaves(output) if isinstance(one, Tensor) and one.is_floating_point()]
            found: Result = {f"output {index}": one.detach() for index, one in enumerate(outputs)}
            ends = [one for one in outputs if one.requires_grad]
            if not ends or not needing:
                return found
            weights = [torch.randn(one.shape, device=one.device).to(one.dtype) for one in ends]
            with backward():
                gradients = torch.autograd.grad(ends, list(needing.values()), weights, allow_unused=True)
        return found | {
            f"the gradient of tensor {place}": gradient for place, gradient in zip(needing, gradients, strict=True)
        }

    def _tensors(self, dtypes: Dtypes, widened: bool) -> list[Any]:
        leaves = list(self.leaves)
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            wanted = leaf.is_floating_point() and (leaf.requires_grad or self.all_need_gradients)
            new = leaf.detach().clone()
            if place in self.places:
                new = new.to(dtypes[self.places.index(place)])
                new = new.float() if widened else new
            leaves[place] = new.requires_grad_(wanted)
        return leaves


def _difference(got: Tensor | None, expected: Tensor | None, tolerance: float) -> str:
    if got is None or expected is None:
        return "" if got is expected else "is missing, and not without autocast"
    if got.shape != expected.shape:
        return f"has the shape {tuple(got.shape)}, and without autocast {tuple(expected.shape)}"
    wide = torch.complex128 if expected.is_complex() else torch.float64
    # What is not finite without autocast either is no fault of autocast's.
    finite = expected.isfinite()
    got, expected = got[finite], expected[finite]
    reference = expected.to(wide)
    distance = float(torch.linalg.vector_norm(got.to(wide) - reference))
    norm = float(torch.linalg.vector_norm(reference))
    if distance <= tolerance * norm:
        return ""
    return f"is off by {distance / norm:.2g} of its norm" if norm else f"is off by {distance:.2g} from 0"


def first_line(error: Exception) -> str:
    """Give an error's kind and the first line of its text."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
