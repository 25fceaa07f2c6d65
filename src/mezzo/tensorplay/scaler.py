"""Gradient scaling for float16 with TensorPlay: `GradScaler`.

Gradients of float16 values underflow to zero where they are small. So the loss is multiplied by a scale, gradients come
out as many times larger, and are divided again before the optimizer sees them (Micikevicius et al., "Mixed Precision
Training", 2018). The scale is as large as it can be: a step whose gradients are Inf or NaN is skipped and the scale
falls; after many steps without any it grows. `mezzo.scaling` has the rule by which the scale moves.
"""

from __future__ import annotations

from typing import Any, TypeVar

from tensorplay import Tensor

from mezzo.errors import ScalerProtocolError

from .scaling.closures import step_with_closure
from .scaling.iterations import STEPPED, UNSCALED
from .scaling.outputs import scale_nested
from .scaling.steps import ScalerSteps, closure_in

__all__ = ["GradScaler"]

T = TypeVar("T")


class GradScaler(ScalerSteps):
    """Scales losses, unscales gradients, skips steps that are not finite, and can tell about it.

    Takes the place of ``tensorplay.amp.GradScaler``, of which it is a subclass: the same methods, arguments and numbers.
    One scaler serves one training loop; it is not for several threads at once. A step reads the device once for each dtype
    of gradients.

    Args:
        device: The type of the device that the losses are on, ``"cuda"`` or ``"cpu"``.
        init_scale: The first scale, at least 2**-126.
        growth_factor: Above 1: what the scale is multiplied by after ``growth_interval`` finite iterations in a row.
        backoff_factor: Between 0 and 1: what it is multiplied by after one that was not finite.
        growth_interval: At least 1.
        enabled: If False, nothing is scaled and `step` just steps.
        min_scale: The scale does not fall below it. Some models need scales below 1.
        max_scale: The scale does not grow beyond it. None: beyond the largest float32.
        max_nan_backoffs: A NaN (without any Inf) that outlives so many backoffs in a row is no overflow: a warning is
            logged that names the parameters, and the scale stays. None: back off forever, as TensorPlay's own; for a run
            that is to find a scale far below the first one, and has only NaN above it.

    Raises:
        ScalingError: A number is not allowed.
        DeviceError: The device is another one.

    Example:
        >>> import tensorplay
        >>> from mezzo.tensorplay import GradScaler
        >>> model = tensorplay.nn.Linear(4, 2)
        >>> optimizer = tensorplay.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = GradScaler("cpu", init_scale=1024.0)
        >>> loss = model(tensorplay.ones(3, 4)).square().mean()
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.stepped(optimizer)
        True
        >>> scaler.update()

    Source: PyTorch's page on automatic mixed precision, https://docs.pytorch.org/docs/stable/amp.html, whose scaler
    TensorPlay's own follows.
    """

    def __init__(
        self,
        device: Any = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 2.0**-24,
        max_scale: float | None = None,
        max_nan_backoffs: int | None = 8,
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
        super().__init__(device, numbers, enabled=enabled)

    def scale(self, outputs: T) -> T:
        """Multiply a loss by the scale; call ``backward`` of what comes out.

        Args:
            outputs: A tensor, or a list, tuple, named tuple or mapping of tensors, nested as they may be. Other iterables
                give an iterator.

        Returns:
            The scaled tensors in the same container, of the dtypes that type promotion gives: a float16 tensor of no
            dimension becomes float32, one of more dimensions stays float16 and may overflow.

        Raises:
            ScalingError: Something in it is no tensor.

        Example:
            >>> import tensorplay
            >>> from mezzo.tensorplay import GradScaler
            >>> scaler = GradScaler("cpu", init_scale=8.0)
            >>> scaler.scale({"loss": tensorplay.tensor(2.0)})
            {'loss': tensor(16.)}
        """
        if not self._enabled:
            return outputs
        return scale_nested(outputs, self._scale_tensor)  # type: ignore[no-any-return]

    def _scale_tensor(self, output: Tensor) -> Tensor:
        if self._scale is None:
            self._put_scale(output.device)
        self._calls += 1
        scaled = output * self._scale.to(device=output.device, non_blocking=True)  # type: ignore[union-attr]
        if self._heard is not None:
            self._heard.append(scaled)
        return scaled

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients of an optimizer's parameters by the scale, in place, and look whether they are finite.

        `step` does it where it was not done; call it before if you look at gradients or change them, once, and after the
        last backward pass of the iteration. Gradients that are not finite are divided as all others.

        Args:
            optimizer: Its gradients may be sparse, and of any dtype but float16. Computed in float32 or wider. Gradients
                of parameters that it shares with another optimizer are divided once.

        Raises:
            ScalerProtocolError: A second time in one iteration, after `step`, or before the first `scale`.
            ScalingError: There are float16 gradients.
        """
        if not self._enabled:
            return
        self._begin("unscale_")
        turn = self._turn_of(optimizer)
        if turn.stage is UNSCALED:
            msg = (
                "unscale_() has already been called on this optimizer since the last update(). Call it once per iteration, "
                "after the last backward pass, and update() at the end."
            )
            raise ScalerProtocolError(msg)
        if turn.stage is STEPPED:
            msg = "unscale_() is being called after step(). Call it before step(), or update() first."
            raise ScalerProtocolError(msg)
        self._unscale(turn)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Unscale the optimizer's gradients if they are not, and step if they are finite.

        A step that is skipped changes neither parameters nor the optimizer's state. Without any gradient there is no step,
        which the log says.

        Args:
            optimizer: The optimizer. TensorPlay's fused SGD and Adagrad divide float16 gradients themselves.
            args: For its ``step``. A closure, here or by keyword, scales its loss and calls ``backward`` itself, as the
                loop does; its gradients are unscaled and looked at each time.
            kwargs: For its ``step``.

        Returns:
            What its ``step`` returns, None if it was skipped; `stepped` tells which.

        Raises:
            ScalerProtocolError: A second `step` in the same iteration; before the first `scale`; a backward pass after
                `unscale_`; or a closure that does not scale its loss.
            ScalingError: There are float16 gradients, and the optimizer does not divide them itself.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        closure = closure_in(args, kwargs)
        if closure is None:
            # With a closure, it is the closure that calls scale().
            self._begin("step")
        turn = self._begin_step(optimizer)
        if closure is not None:
            return step_with_closure(self, turn, closure, args, kwargs)
        return self._step(turn, args, kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale, after all steps of an iteration. Without any gradients it stays.

        Args:
            new_scale: Set this scale instead: a number, or a tensor of one element.

        Raises:
            ScalerProtocolError: Before the first `scale`; or nothing was stepped or unscaled since the last call.
            ScalingError: The new scale is not allowed; the old one stays.
        """
        if not self._enabled:
            return
        self._begin("update")
        if new_scale is None:
            self._move_scale()
        else:
            self._set_scale(new_scale)
        self._end_iteration()
