"""The shortest script with several processes: a linear model, amp, and Apex's DistributedDataParallel."""

import argparse
import os

import torch
from apex import amp
from apex.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=0, type=int)
args = parser.parse_args()

args.distributed = "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1
if args.distributed:
    torch.distributed.init_process_group(backend="gloo", init_method="env://")
rank = torch.distributed.get_rank() if args.distributed else 0

torch.manual_seed(rank)
N, D_in, D_out = 64, 32, 4
x, y = torch.randn(N, D_in), torch.randn(N, D_out)

model = torch.nn.Linear(D_in, D_out)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
if args.distributed:
    model = DistributedDataParallel(model)
loss_fn = torch.nn.MSELoss()

for _ in range(40):
    optimizer.zero_grad()
    y_pred = model(x)
    loss = loss_fn(y_pred, y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

weights = model.module if args.distributed else model
print(f"rank {rank} final loss = {loss.item():.5f} weights = {weights.weight.double().sum().item():.9f}", flush=True)
if args.distributed:
    torch.distributed.destroy_process_group()
