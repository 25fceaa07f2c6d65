"""LARC: rates per parameter from the ratio of its norm to that of its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["LARC"]


class LARC:
    r"""Layer-wise adaptive rates around an optimizer, by changing the gradients that it steps with.

    The local rate of a parameter w with gradient g and weight decay d is
    ``trust_coefficient * |w| / (|g| + d * |w| + eps)``. The optimizer steps with ``(g + d * w)`` times the local rate, and
    without a decay of its own. With ``clip`` it steps with ``(g + d * w)`` times ``min(local / lr, 1)``, so that the rate
    of a parameter is the local one, or the learning rate if that is less. A parameter whose norm, or whose gradient's norm,
    is 0 is stepped by its gradient as it is, without decay, as in Apex.

    It is no `torch.optim.Optimizer`; what is asked of it and it has not, its optimizer is asked for.

    Args:
        optimizer: An optimizer with ``lr`` in its groups; SGD with momentum in the paper. Its weight decay is taken over.
        trust_coefficient: The factor in the local rate.
        clip: Whether to clip (LARC), or to scale by the local rate alone (LARS).
        eps: Added to the divisor.

    Attributes:
        optim: The optimizer inside.

    Norms and rates stay on the device: no step waits for it.

    Example:
        >>> import torch
        >>> from mezzo.apex.parallel import LARC
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = LARC(torch.optim.SGD([weight], lr=1.0), trust_coefficient=0.1, clip=False)
        >>> weight.grad = torch.tensor([0.0, 2.0])
        >>> optimizer.step()  # the local rate is 0.1 * 5 / 2
        >>> weight.data
        tensor([3.0000, 3.5000])

    Source: You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017, arXiv:1708.03888.
    """

    def __init__(self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups; what is set in them counts."""
        return self.optim.param_groups  # type: ignore[no-any-return]

    @property
    def state(self) -> Any:
        """The optimizer's state by parameter."""
        return self.optim.state

    def state_dict(self) -> dict[str, Any]:
        """Give the optimizer's state dict."""
        return self.optim.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an optimizer's state dict.

        Args:
            state_dict: From `state_dict`, or from the optimizer without LARC.
        """
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients.

        Args:
            *args: As the optimizer takes them.
            **kwargs: As the optimizer takes them.
        """
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: As the optimizer takes it.
        """
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change the gradients, in place, and step.

        Args:
            closure: If given, called once before, with gradients enabled, for the loss.

        Returns:
            The closure's result, or what the optimizer's step returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._decay_taken_over() as decays:
            for group, decay in zip(self.param_groups, decays, strict=True):
                self._scale(group, decay)
            result = self.optim.step()
        return result if closure is None else loss

    @contextmanager
    def _decay_taken_over(self) -> Iterator[list[Any]]:
        """Set the optimizer's weight decay to 0 for a step; give what it was, per group."""
        groups = self.param_groups
        decays = [group.get("weight_decay", 0.0) for group in groups]
        for group in groups:
            group["weight_decay"] = 0.0
        try:
            yield decays
        finally:
            for group, decay in zip(groups, decays, strict=True):
                group["weight_decay"] = decay

    @torch.no_grad()
    def _scale(self, group: dict[str, Any], decay: float) -> None:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            # Squares of float16 values above 255 overflow: norms are float32, as the rates are.
            size, slope = _norm(parameter), _norm(gradient)
            rate = self.trust_coefficient * size / (slope + decay * size + self.eps)
            if self.clip:
                rate = (rate / group["lr"]).clamp(max=1.0)
            changes = (size != 0) & (slope != 0)
            decayed = gradient.add(parameter, alpha=decay).mul_(rate)
            gradient.copy_(torch.where(changes, decayed, gradient))


def _norm(values: Tensor) -> Tensor:
    wide = torch.float64 if values.dtype is torch.float64 else torch.float32
    return torch.linalg.vector_norm(values.detach(), dtype=wide)  # type: ignore[no-any-return]
