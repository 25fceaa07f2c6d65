"""Training steps that are as they should be have no findings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo.torch
from mezzo.report import Report
from mezzo.torch import autocast, explain
from mezzo.torch.linting.findings import KINDS, findings_of

from .made import kinds, op


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def convolutional() -> nn.Module:
    features = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(4 * 16, 3))


def encoder() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3))


def steps(model: nn.Module, x: Tensor, dtype: torch.dtype, scaler: Any) -> Report:
    """Take two steps of training, with clipping, and report."""
    optimizer = torch.optim.AdamW(model.parameters())
    with explain(model=model) as explained:
        for _ in range(2):
            with autocast("cpu", dtype=dtype):
                out = model(x)
                loss = F.cross_entropy(out.flatten(0, -2), torch.zeros(out.numel() // 3, dtype=torch.long))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return explained.report


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("amp", ["mezzo", "torch"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [(convolutional, (2, 1, 6, 6)), (Recurrent, (2, 3, 8)), (encoder, (2, 3, 8))],
    ids=["convolutions", "LSTM", "encoder"],
)
def test_a_sound_training_step_has_no_findings(make: Any, shape: tuple[int, ...], amp: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scaler = (mezzo.torch if amp == "mezzo" else torch.amp).GradScaler("cpu", enabled=dtype is torch.float16)
    report = steps(make(), torch.rand(shape), dtype, scaler)
    assert len(report.records) > 50
    assert {finding.kind for finding in report.warnings} - {"slow dtype"} == set()


def test_a_training_step_in_float32_has_no_findings() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    with explain(model=model) as explained:
        F.binary_cross_entropy(model(torch.rand(2, 4)), torch.ones(2, 4)).backward()
    assert explained.report.records
    assert explained.report.warnings == ()


def test_ops_of_clipping_and_of_the_scaler_are_not_taken_for_the_models() -> None:
    wide = {"came": "float16", "used": "float32", "gave": "float32", "rule": "fp32"}
    assert kinds(op("norm", **wide)) == ["float32 memory"]
    assert (
        kinds(op("norm", **wide, callers=("clip_grad_norm_",)), op("norm", 1, **wide, callers=("get_total_norm",)))
        == []
    )


def test_nothing_recorded_gives_no_findings() -> None:
    assert list(findings_of([])) == []


def test_the_gravest_kinds_come_first() -> None:
    ops = [
        op("softmax", 0, came="float16", used="float32", gave="float32", rule="fp32"),
        op("add", 1, came="float16", gave="float16", scalars=(1e-8,)),
        op("mul", 2, came="float16", gave="float16", scalars=(-1e9,)),
    ]
    found = [finding.kind for finding in findings_of(ops)]
    assert found == ["mask overflow", "eps lost", "float32 memory"]
    assert sorted(found, key=KINDS.index) == found


def test_findings_can_be_hashed_merged_and_written_as_data() -> None:
    [finding] = findings_of([op("mul", came="float16", gave="float16", scalars=(-1e9,))])
    assert len({finding, finding}) == 1
    assert finding.as_dict()["kind"] == "mask overflow"
    assert finding.as_dict()["path"] == "net"
