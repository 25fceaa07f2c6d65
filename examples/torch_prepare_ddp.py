"""Masters under DistributedDataParallel: two processes on the CPU, whose gradients are added up in float32.

Run it with ``python examples/torch_prepare_ddp.py``; it takes some seconds, most of them to start the processes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.torch import autocast, master_params, prepare

WORLD = 2


def train(rank: int) -> tuple[float, float, str, float]:
    """Train for one epoch on every other batch.

    Args:
        rank: Which process this is.

    Returns:
        The first and the last loss, the dtype of a gradient, and the sum of what the optimizer holds.
    """
    torch.manual_seed(0)
    inputs = torch.randn(1500, 64)
    labels = (inputs @ torch.randn(64, 10)).argmax(-1)  # what a linear net can learn
    torch.manual_seed(rank)  # ranks begin with different weights: DDP gives all of them those of rank 0, masters too
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer = prepare(net, optimizer, dtype=torch.bfloat16)  # first prepare, then wrap
    model = DistributedDataParallel(net)
    losses = []
    for start in range(50 * rank, 1500, 50 * WORLD):
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs[start : start + 50]), labels[start : start + 50])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    masters = torch.cat([each.detach().flatten() for each in master_params(optimizer)])
    return losses[0], losses[-1], str(net[0].weight.grad.dtype), masters.double().sum().item()


def work(rank: int, meeting_point: str) -> None:
    """Be one of the processes.

    Args:
        rank: Which.
        meeting_point: A file by which they find each other.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=WORLD)
    try:
        results = [None] * WORLD
        dist.all_gather_object(results, train(rank))  # the model and its DDP are gone when train returns
        if rank == 0:
            for each, (first, last, dtype, total) in enumerate(results):
                print(f"rank {each}: loss {first:.4f} -> {last:.4f}, gradients {dtype}, sum of masters {total:.6f}")
            print(f"same masters on both: {results[0][3] == results[1][3]}", flush=True)
        dist.barrier()  # nobody leaves while another is still receiving
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(str(Path(folder, "meeting-point")),), nprocs=WORLD)


if __name__ == "__main__":
    main()
