"""Paired timings of mezzo against PyTorch's own autocast: ``python -m benchmarks``, from the root."""
