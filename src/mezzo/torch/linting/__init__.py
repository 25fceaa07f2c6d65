"""The lint: one file for each kind of finding, over modules, source text and what `mezzo.torch.explain` has recorded."""
