"""The parts of `mezzo.torch.GradScaler`: unscaling, verdicts, steps, reports, and what goes with them.

``mezzo.torch.scaler`` is the class; its numbers and their transitions are the core's (``mezzo.scaling``).
"""
