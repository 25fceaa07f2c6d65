"""The float32 run beside the real one, by which `mezzo.torch.explain` tells relative errors."""
