"""The classes of `apex.fp16_utils` that `amp` took over from: there to be imported, not to be used."""

from __future__ import annotations

from mezzo.errors import AmpError

__all__ = ["DynamicLossScaler", "FP16_Optimizer", "LossScaler"]


class _Gone:
    """A class of Apex's from before `amp`: there to be imported, not to be used."""

    instead: str

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs
        msg = f"mezzo has no {type(self).__name__}, which Apex had from before amp. {self.instead}."
        raise AmpError(msg)


class FP16_Optimizer(_Gone):  # noqa: N801 - Apex's name
    """Not there: raises `mezzo.errors.AmpError` when it is made, and names what to use."""

    instead = (
        "Leave model and optimizer in float32, call model, optimizer = amp.initialize(model, optimizer, opt_level='O2'), "
        "and in the place of optimizer.backward(loss) write: with amp.scale_loss(loss, optimizer) as scaled: "
        "scaled.backward()"
    )


class LossScaler(_Gone):
    """Not there: raises `mezzo.errors.AmpError` when it is made, and names what to use."""

    instead = "amp.initialize(..., loss_scale=128.0) has a fixed scale; mezzo.torch.GradScaler is one to use by itself"


class DynamicLossScaler(_Gone):
    """Not there: raises `mezzo.errors.AmpError` when it is made, and names what to use."""

    instead = "amp.initialize(..., loss_scale='dynamic') has one; mezzo.torch.GradScaler is one to use by itself"
