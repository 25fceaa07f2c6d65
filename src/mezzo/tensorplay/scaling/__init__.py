"""The parts of `mezzo.tensorplay.GradScaler`; ``mezzo.tensorplay.scaler`` is the class."""
