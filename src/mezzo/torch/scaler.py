"""Gradient scaling for float16: `GradScaler`.

Gradients of float16 values underflow to zero where they are small. So the loss is multiplied by a scale, gradients come
out as many times larger, and are divided again before the optimizer sees them (Micikevicius et al., "Mixed Precision
Training", 2018). The scale is as large as it can be: a step whose gradients are Inf or NaN is skipped and the scale
falls; after many steps without any it grows. docs/scaling.md tells the story; `mezzo.scaling` has the rule by which the
scale moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from mezzo.errors import ScalerProtocolError
from mezzo.torch.eager import runs_eagerly, runs_itself_eagerly
from mezzo.torch.scaling import clipping
from mezzo.torch.scaling.closures import closure_in, step_with_closure
from mezzo.torch.scaling.contract import decides_itself
from mezzo.torch.scaling.gradients import parameters_of
from mezzo.torch.scaling.merging import merging, refuse_others
from mezzo.torch.scaling.outputs import scale_nested
from mezzo.torch.scaling.reports import Reports
from mezzo.torch.scaling.verdicts import SCALED, STEPPED, UNSCALED

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup

    from mezzo.torch.scaling.nonfinite import Overflow

__all__ = ["GradScaler"]

T = TypeVar("T")
Parameters = Tensor | Iterable[Tensor] | torch.optim.Optimizer | torch.nn.Module


class GradScaler(Reports):
    """Scales losses, unscales gradients, skips steps that are not finite, and can tell about it.

    Takes the place of ``torch.amp.GradScaler``, of which it is a subclass: the same methods, arguments and numbers. One
    scaler serves one training loop; it is not for several threads at once.

    Args:
        device: The type of the device that the losses are on, ``"cuda"``, ``"cpu"`` or any other that PyTorch knows.
        init_scale: The first scale, at least 2**-126.
        growth_factor: Above 1: what the scale is multiplied by after ``growth_interval`` finite iterations in a row.
        backoff_factor: Between 0 and 1: what it is multiplied by after one that was not finite.
        growth_interval: At least 1.
        enabled: If False, nothing is scaled and `step` just steps.
        min_scale: The scale does not fall below it. Some models need scales below 1.
        max_scale: The scale does not grow beyond it. None: beyond the largest float32.
        max_skipped: So many skipped steps of an optimizer in a row are an error that names the parameters. None: never.
        max_nan_backoffs: A NaN (without any Inf) that outlives so many backoffs in a row is no overflow: a warning is
            logged that names the parameters, and the scale stays; before the first step that is made, only if float16
            cannot be to blame. None: back off forever, as PyTorch.
        process_group: Ranks of this group take every decision together. DTensor parameters (FSDP2) need none: the ranks
            of their meshes agree in any case.
        strict: An optimizer without gradients, and `update` without any step, are errors, as in PyTorch.
        on_overflow: Called with an `Overflow` when a step is skipped. Or ``"explain"``: the iteration after a skipped step
            is watched as by `mezzo.torch.find_nonfinite`, and if it overflows again, the op is named in the log and in
            `explanation`.

    Raises:
        ScalingError: A number is not allowed.
        DeviceError: PyTorch knows no such device.

    Example:
        >>> import torch
        >>> from mezzo.torch import GradScaler, autocast
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = GradScaler("cpu", init_scale=1024.0)
        >>> with autocast("cpu", dtype=torch.float16):
        ...     loss = model(torch.ones(3, 4)).square().mean()
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.stepped(optimizer)
        True
        >>> scaler.update()

    Source: PyTorch's page on automatic mixed precision, https://docs.pytorch.org/docs/stable/amp.html.
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 2.0**-24,
        max_scale: float | None = None,
        max_skipped: int | None = None,
        max_nan_backoffs: int | None = 8,
        process_group: ProcessGroup | None = None,
        strict: bool = False,
        on_overflow: Callable[[Overflow], object] | Literal["explain"] | None = None,
    ) -> None:
        numbers = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "min_scale": min_scale,
            "max_scale": max_scale,
            "max_nan_backoffs": max_nan_backoffs,
        }
        super().__init__(
            device,
            numbers,
            enabled=enabled,
            max_skipped=max_skipped,
            process_group=process_group,
            strict=strict,
            on_overflow=on_overflow,
        )

    def scale(self, outputs: T) -> T:
        """Multiply a loss by the scale; call ``backward`` of what comes out.

        Args:
            outputs: A tensor, or any container of tensors: list, tuple, named tuple, mapping, dataclass, pytree, nested
                as they may be. Other iterables give an iterator.

        Returns:
            The scaled tensors in the same container, of the dtypes that type promotion gives: a float16 tensor of no
            dimension becomes float32, one of more dimensions stays float16 and may overflow.

        Raises:
            ValueError: Something in it is no tensor.

        Example:
            >>> scaler = GradScaler("cpu", init_scale=8.0)
            >>> scaler.scale({"loss": torch.tensor(2.0)})
            {'loss': tensor(16.)}
        """
        if not self._enabled:
            return outputs
        # Traced by torch.compile: no counter here, which would be another number at each call.
        self._scaled_now = True
        if isinstance(outputs, Tensor):
            return self._scale_tensor(outputs)  # type: ignore[return-value]
        return scale_nested(outputs, self._scale_tensor)  # type: ignore[no-any-return]

    def _scale_tensor(self, output: Tensor) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
        scaled = output * self._scale.to(output.device, non_blocking=True)  # type: ignore[union-attr]
        if torch.compiler.is_compiling():
            self._scaled_unseen = True
        else:
            self._saw_scaled(scaled)
        return scaled

    @runs_eagerly
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer's parameters by the scale, in place, and look whether they are finite.

        `step` does it where it was not done; call it before if you look at gradients or change them. They stay unscaled
        until `update`: a second call does nothing, and what a later backward pass adds is unscaled when that is over.
        No host read.

        Args:
            optimizer: Its gradients may have any dtype, be sparse or DTensors. Computed in float32 or wider.

        Raises:
            ScalerProtocolError: After `step` in the same iteration, or before the first `scale`.
        """
        if not self._enabled:
            return
        self._begin("unscale_")
        self._open.settle()
        state = self._state_of(optimizer)
        if state["stage"] is STEPPED:
            msg = "unscale_() is being called after step(). Call it before step(), or update() first."
            raise ScalerProtocolError(msg)
        if state["stage"] is UNSCALED and not self._has_new_gradients(optimizer, state):
            self._refuse_unseen()
            return
        self._unscale(optimizer, state)
        self._open.unscaled()

    @runs_itself_eagerly
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the optimizer's gradients if they are not, and step if they are finite.

        An optimizer without any gradient is left alone. One that decides by itself (``_step_supports_amp_scaling``,
        such as PyTorch's fused ones) is always called, and the host does not wait for the device; otherwise it reads
        one verdict.

        Args:
            optimizer: The optimizer.
            args: For its ``step``. A closure, here or by keyword, scales its loss and calls ``backward`` itself, as the
                loop does; its gradients are unscaled and looked at each time.
            kwargs: For its ``step``.

        Returns:
            What its ``step`` returns, None if it was skipped; `stepped` tells which.

        Raises:
            ScalerProtocolError: A second `step` in the same iteration, or before the first `scale`.
            SkippedStepsError: ``max_skipped`` steps in a row were skipped. After `update` one can go on.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        closure = closure_in(optimizer, args, kwargs)
        # With a closure, it is the closure that calls scale().
        state = self._begin_step(optimizer, scaled=closure is None)
        if state.get("sum"):
            refuse_others(self, optimizer)
        if closure is not None:
            return step_with_closure(self, optimizer, state, args, kwargs)
        if decides_itself(optimizer):
            return self._step_by_contract(optimizer, state, args, kwargs)
        if state["stage"] is SCALED:
            self.unscale_(optimizer)
        self._agree(optimizer, state)
        if not state["found_inf_per_device"]:
            return self._without_gradients(optimizer)
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        self._end_step(optimizer, state)
        return result

    @runs_eagerly
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale, after all steps of an iteration; no host read.

        Args:
            new_scale: Set this scale instead: a number, or a tensor of one element. One on another device that is no
                scale (not finite, or below 2**-126) is ignored, since looking at it would be a host read.

        Raises:
            ScalerProtocolError: Before the first `scale`; if ``strict``, also if nothing was unscaled since the last
                call.
            ScalingError: The new scale is not allowed; the old one stays.
        """
        if not self._enabled:
            return
        self._begin_update()
        if new_scale is None:
            self._move_scale()
        else:
            self._set_scale(new_scale)
        self._end_iteration()

    @runs_eagerly
    def get_scale(self) -> float:
        """Give the scale; 1.0 if disabled. Reads the device."""
        if not self._enabled:
            return 1.0
        if self._scale is None:
            return self._init_scale
        scale: float = self._scale.item()
        self._host_reads(scale)
        return scale

    @runs_eagerly
    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint needs, in PyTorch's format; call it after `update`. Reads the device.

        Returns:
            ``scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval`` and ``_growth_tracker``; empty if
            disabled.
        """
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
        }

    # Clipping

    @runs_eagerly
    def clip_grad_norm_(
        self,
        parameters: Parameters,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the norm of gradients, scaled or not, as ``torch.nn.utils.clip_grad_norm_`` clips unscaled ones.

        Args:
            parameters: Parameters, or an optimizer or module for all of its own.
            max_norm: Of the gradients as they are without the scale.
            norm_type: The p of the norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: Raise if the norm is not finite, which is a host read.
            foreach: As there.

        Returns:
            The norm of all gradients without the scale. If it is not finite they are left as they are, so that the step
            is skipped and the right parameters are named.
        """
        scaled, unscaled = self._gradients_of(parameters)
        scale = self._scale_or_one()
        with self._only_clipping():
            norm = clipping.clip_norm_(scaled, unscaled, scale, max_norm, norm_type, error_if_nonfinite, foreach)
        for history in self._watched_by:
            history._take_norm(norm)
        return norm

    @runs_eagerly
    def clip_grad_value_(self, parameters: Parameters, clip_value: float, foreach: bool | None = None) -> None:
        """Clip each element of gradients, scaled or not, as ``torch.nn.utils.clip_grad_value_`` clips unscaled ones.

        Args:
            parameters: Parameters, or an optimizer or module for all of its own.
            clip_value: Of the gradients as they are without the scale.
            foreach: As there.
        """
        scaled, unscaled = self._gradients_of(parameters)
        with self._only_clipping():
            clipping.clip_value_(scaled, unscaled, self._scale_or_one(), clip_value, foreach)

    def _gradients_of(self, parameters: Parameters) -> tuple[list[Tensor], list[Tensor]]:
        """Sort gradients into those that are scaled and those that are not."""
        self._open.settle()
        if isinstance(parameters, Tensor):
            listed = [parameters]
        elif hasattr(parameters, "param_groups"):
            listed = parameters_of(parameters)
        elif isinstance(parameters, torch.nn.Module):
            listed = list(parameters.parameters())
        else:
            listed = list(parameters)
        pairs = list(zip(listed, self._are_unscaled(listed), strict=True))
        return (
            [one.grad for one, unscaled in pairs if one.grad is not None and not unscaled],
            [one.grad for one, unscaled in pairs if one.grad is not None and unscaled],
        )

    # Several losses, several backward passes

    def merge(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Add the gradients of this scaler's loss to those that an optimizer's parameters have, unscaled.

        Inside, parameters have no gradients but those of this loss. At the end these are unscaled and looked at by this
        scaler, and added to the others, which are taken to be unscaled. After an exception the others are there again.

        Args:
            optimizer: To be stepped with `step_merged`.

        Example:
            >>> from mezzo.torch import step_merged
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = torch.optim.SGD([weight], lr=0.5)
            >>> scalers = [GradScaler("cpu", init_scale=4.0), GradScaler("cpu", init_scale=64.0)]
            >>> for scaler, loss in zip(scalers, [weight.sum(), (2 * weight).sum()]):
            ...     with scaler.merge(optimizer):
            ...         scaler.scale(loss).backward()
            >>> weight.grad
            tensor([3., 3.])
            >>> step_merged(optimizer, scalers)
            >>> for scaler in scalers:
            ...     scaler.update()
        """
        return merging(self, optimizer)

    def accumulate(self) -> AbstractContextManager[None]:
        """Keep the scale until the end of the region: `update` inside takes verdicts down for the first one after it.

        For accumulation over several iterations of another optimizer of the same scaler. Where `update` is called only
        after the last micro-batch, as usual, the scale stays by itself.

        Example:
            >>> with GradScaler("cpu").accumulate():
            ...     pass
        """
        return self._holding()
