"""Paired timings of mezzo against PyTorch's own autocast and scaler: ``python -m benchmarks``, from the root."""
