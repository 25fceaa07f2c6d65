"""DistributedDataParallel at O2: two processes on the CPU, whose float32 masters stay the same, bit for bit.

``amp.initialize`` comes first, then the model is wrapped. One rank meets an Inf: since DDP averages gradients in the
backward pass, both see it and both skip. Run it with ``python examples/apex/ddp.py``; it takes some seconds, most of them to
start the processes. With ``from apex import amp`` in the place of the import below, ``python -m mezzo.apex ddp.py`` runs it,
and ``torchrun --nproc-per-node 2 -m mezzo.apex script.py`` a script that torchrun starts.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mezzo.apex import amp
from mezzo.apex.parallel import DistributedDataParallel  # or torch.nn.parallel's

WORLD = 2


def train(rank: int, opt_level: str) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Train for one epoch on every other batch.

    Args:
        rank: Which process this is.
        opt_level: A level.

    Returns:
        The first loss, the last one and the scale; what the optimizer updates; and the model's weights.
    """
    torch.manual_seed(0)
    inputs = torch.randn(1500, 64)
    labels = (inputs @ torch.randn(64, 10)).argmax(-1)  # what a linear net can learn
    torch.manual_seed(rank)  # DDP gives all ranks what rank 0 has
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, max_loss_scale=2.0**12, verbosity=0)
    model = DistributedDataParallel(model)
    losses = []
    for step, start in enumerate(range(50 * rank, 1500, 50 * WORLD)):
        rows = slice(start, start + 50)
        loss = nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
        if step == 5 and rank == 1:
            loss = loss * torch.inf
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    masters = [each.detach().clone() for each in amp.master_params(optimizer)]
    return [losses[0], losses[-1], scale], masters, [each.detach() for each in model.parameters()]


def work(rank: int, opt_level: str, meeting_point: str) -> None:
    """Be one of the processes.

    Args:
        rank: Which.
        opt_level: A level.
        meeting_point: A file by which they find each other.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=WORLD)
    results: list[tuple[list[float], list[Tensor], list[Tensor]]] = [([], [], [])] * WORLD
    dist.all_gather_object(results, train(rank, opt_level))
    if rank == 0:
        for each, ((first, last, scale), masters, weights) in enumerate(results):
            print(
                f"rank {each}: loss {first:.4f} -> {last:.4f}, scale {scale:.0f}, masters {masters[0].dtype},"
                f" weights {weights[0].dtype}"
            )
        same = all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))
        rounded = all(torch.equal(one.to(two.dtype), two) for one, two in zip(*results[0][1:], strict=True))
        print(f"same masters on both: {same}; the weights are the masters, rounded: {rounded}", flush=True)
    dist.barrier()  # nobody leaves while another is still receiving
    dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--opt-level", default="O2")
    opt_level = parser.parse_args().opt_level
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(opt_level, str(Path(folder, "meeting-point"))), nprocs=WORLD)


if __name__ == "__main__":
    main()
