"""The search for the first op that made something not finite: `mezzo.torch.find_nonfinite`."""
