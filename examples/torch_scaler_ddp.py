"""DistributedDataParallel, one device per process: two processes on the CPU, one of which meets an Inf.

Run it with ``python examples/torch_scaler_ddp.py``; it takes some seconds, most of them to start the processes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.torch import GradScaler, autocast

WORLD = 2


def train(rank: int) -> tuple[float, float, float, int, float]:
    """Train for one epoch on every other batch.

    Args:
        rank: Which process this is.

    Returns:
        The first and the last loss, the scale, the number of steps that were made, and the sum of the parameters.
    """
    torch.manual_seed(0)
    inputs = torch.randn(1500, 64)
    labels = (inputs @ torch.randn(64, 10)).argmax(-1)  # what a linear net can learn
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # DDP averages gradients before the scaler sees them, so all ranks see the same; process_group makes the decision
    # one in any case, also where gradients are local, as under FSDP.
    scaler = GradScaler("cpu", init_scale=2.0**12, process_group=dist.group.WORLD)
    losses = []
    for step, start in enumerate(range(50 * rank, 1500, 50 * WORLD)):
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(inputs[start : start + 50]), labels[start : start + 50])
        scaler.scale(loss).backward()
        if step == 5 and rank == 1:
            net[0].weight.grad[0, 0] = torch.inf  # after the averaging: the other rank knows nothing of it
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    parameters = torch.cat([p.detach().flatten() for p in net.parameters()])
    return losses[0], losses[-1], scaler.get_scale(), scaler.steps_taken(optimizer), parameters.double().sum().item()


def work(rank: int, meeting_point: str) -> None:
    """Be one of the processes.

    Args:
        rank: Which.
        meeting_point: A file by which they find each other.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=WORLD)
    results = [None] * WORLD
    dist.all_gather_object(results, train(rank))
    if rank == 0:
        for each, (first, last, scale, steps, total) in enumerate(results):
            print(
                f"rank {each}: loss {first:.4f} -> {last:.4f}, {steps} of 15 steps, scale {scale:.0f}, sum {total:.6f}"
            )
        print(f"same scale, steps and parameters on both: {results[0][2:] == results[1][2:]}", flush=True)
    dist.barrier()  # nobody leaves while another is still receiving
    dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(str(Path(folder, "meeting-point")),), nprocs=WORLD)


if __name__ == "__main__":
    main()
