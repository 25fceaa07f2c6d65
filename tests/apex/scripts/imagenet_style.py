"""Trains a small convolutional net on made-up images, in the manner of scripts for Apex: every option is a string."""

import argparse
import os
import time

import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
from torch import nn

try:
    from apex import amp, optimizers
    from apex.fp16_utils import *  # noqa: F403
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.parallel import DistributedDataParallel as ApexDDP
except ImportError as error:
    raise SystemExit("this needs NVIDIA's apex") from error


def parse():
    parser = argparse.ArgumentParser(description="Training on made-up images")
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("-b", "--batch-size", default=32, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    parser.add_argument("--weight-decay", default=1e-4, type=float)
    parser.add_argument("--local_rank", default=os.environ.get("LOCAL_RANK", "0"), type=int)
    parser.add_argument("--sync_bn", action="store_true")
    parser.add_argument("--opt-level", type=str)
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--checkpoint", type=str, default="")
    return parser.parse_args()


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


class Net(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


class Prefetcher:
    """Hands out normalized batches one by one, and (None, None) at the end."""

    def __init__(self, loader):
        self.loader = iter(loader)
        self.mean = torch.tensor([0.1, 0.1, 0.1]).view(1, 3, 1, 1)

    def next(self):
        try:
            images, target = next(self.loader)
        except StopIteration:
            return None, None
        return images.float().sub_(self.mean), target


def made_up(count, seed):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(4, (count,), generator=generator)
    images = torch.randn(count, 3, 8, 8, generator=generator)
    images += 2 * (target.view(-1, 1, 1, 1) - 1.5) * torch.tensor([1.0, -1.0, 0.5]).view(1, 3, 1, 1)
    return torch.utils.data.TensorDataset(images, target)


def reduce_tensor(tensor):
    total = tensor.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total / dist.get_world_size()


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean() * 100


def train(loader, model, criterion, optimizer, epoch):
    losses, top1 = Meter(), Meter()
    model.train()
    prefetcher = Prefetcher(loader)
    images, target = prefetcher.next()
    i = 0
    while images is not None:
        i += 1
        adjust_learning_rate(optimizer, epoch, i, len(loader))
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        prec1, reduced = accuracy(output.data, target), loss.data
        if args.distributed:
            prec1, reduced = reduce_tensor(prec1), reduce_tensor(reduced)
        losses.update(to_python_float(reduced), images.size(0))  # noqa: F405
        top1.update(to_python_float(prec1), images.size(0))  # noqa: F405
        if args.local_rank == 0:
            print(f"Epoch: [{epoch}][{i}/{len(loader)}]\tLoss {losses.avg:.6f}\tPrec@1 {top1.avg:.3f}")
        images, target = prefetcher.next()


def validate(loader, model, criterion):
    losses, top1 = Meter(), Meter()
    model.eval()
    prefetcher = Prefetcher(loader)
    images, target = prefetcher.next()
    while images is not None:
        with torch.no_grad():
            output = model(images)
            loss = criterion(output, target)
        losses.update(to_python_float(loss.data), images.size(0))  # noqa: F405
        top1.update(to_python_float(accuracy(output.data, target)), images.size(0))  # noqa: F405
        images, target = prefetcher.next()
    return losses.avg, top1.avg


def adjust_learning_rate(optimizer, epoch, step, len_epoch):
    lr = args.lr
    if epoch == 0:
        lr = lr * float(1 + step) / len_epoch
    for group in optimizer.param_groups:
        group["lr"] = lr


def main():
    global args  # noqa: PLW0603
    args = parse()
    print("opt_level =", args.opt_level)
    print("multi_tensor_applier.available =", multi_tensor_applier.available)
    cudnn.benchmark = True
    torch.manual_seed(0)
    args.distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if args.distributed:
        dist.init_process_group(backend="gloo", init_method="env://")
    model = Net()
    if args.sync_bn:
        import apex

        print("using apex synced BN")
        model = apex.parallel.convert_syncbn_model(model)
    if args.fused:
        optimizer = optimizers.FusedSGD(model.parameters(), args.lr, momentum=0.9, weight_decay=args.weight_decay)
    else:
        optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=args.weight_decay)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        model = ApexDDP(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss()
    data, checks = made_up(256, seed=1), made_up(128, seed=2)
    sampler = torch.utils.data.distributed.DistributedSampler(data) if args.distributed else None
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, shuffle=sampler is None, sampler=sampler)
    check_loader = torch.utils.data.DataLoader(checks, batch_size=args.batch_size)
    start = time.time()
    for epoch in range(args.epochs):
        if args.distributed:
            sampler.set_epoch(epoch)
        train(loader, model, criterion, optimizer, epoch)
        loss, prec1 = validate(check_loader, model, criterion)
        if args.local_rank == 0:
            print(f" * Prec@1 {prec1:.3f} Loss {loss:.6f}")
    if args.local_rank == 0 and args.checkpoint:
        torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint)
    assert time.time() >= start
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
