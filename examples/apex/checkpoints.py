"""Checkpoints: model, optimizer and amp are saved, and a run resumes bit for bit, whichever is loaded first.

With Apex a resumed O2 run was another one: masters were in no state dict, and small second moments became 0. Run it with
``python examples/apex/checkpoints.py``. With ``from apex import amp`` in the place of the import below,
``python -m mezzo.apex checkpoints.py`` runs it.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mezzo.apex import amp

PARTS = ("model", "optimizer", "amp")


def digits() -> tuple[Tensor, Tensor]:
    """Load 1797 handwritten digits, 64 pixels each."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def start(opt_level: str) -> dict[str, Any]:
    """Make a model and an optimizer, and initialize them: before anything is loaded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    return {"model": model, "optimizer": optimizer, "amp": amp}


def train(run: dict[str, Any], batches: Iterable[int]) -> list[float]:
    """Train on some batches of 50; gives their losses."""
    images, labels = digits()
    model, optimizer = run["model"], run["optimizer"]
    losses = []
    for batch in batches:
        rows = slice(50 * batch, 50 * batch + 50)
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Stop in the middle, resume in each order, and compare with the run that went on."""
    for level in ("O1", "O2", "O3"):
        run = start(level)
        train(run, range(15))
        file = io.BytesIO()
        torch.save({name: run[name].state_dict() for name in PARTS}, file)
        expected = train(run, range(15, 30))
        weights = run["model"].state_dict()
        same = []
        for order in itertools.permutations(PARTS):
            file.seek(0)
            checkpoint = torch.load(file)
            again = start(level)
            for name in order:
                again[name].load_state_dict(checkpoint[name])
            losses = train(again, range(15, 30))
            found = again["model"].state_dict()
            same.append(losses == expected and all(torch.equal(found[name], weights[name]) for name in weights))
        scale = checkpoint["amp"]["loss_scaler0"]["loss_scale"]
        dtypes = {str(each.dtype) for each in weights.values() if each.is_floating_point()}
        print(
            f"{level}: scale {scale:.0f}, state dict of the model in {', '.join(dtypes)}; resumed in {len(same)} orders, all"
            f" the same bit for bit: {all(same)}"
        )


if __name__ == "__main__":
    main()
