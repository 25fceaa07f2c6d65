"""What ran, op by op: `mezzo.torch.explain`, and how an op's name, module, line, origin and numbers are known."""
