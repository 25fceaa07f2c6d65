"""Pages of what really ran: a small net in bfloat16, forward, backward and step, and one that overflows in float16."""

from __future__ import annotations

import torch
from torch import nn

import mezzo.torch

from .opened import Opened, wait_for_text


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Sequential(nn.GELU(), nn.Linear(16, 4)))


def test_the_page_of_a_training_step_shows_its_modules_ops_and_numbers(opened: Opened) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mezzo.torch.explain(model=model, numerics=True, shadow=True) as explained:
        with mezzo.torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 4))
        loss.backward()
        optimizer.step()
    report = explained.report
    window = opened(report)
    assert window.inner_text("#fact-ops .value") == str(len(report.records)) != "0"
    assert window.inner_text("#fact-casts .value") == str(report.totals.casts) != "0"
    window.click("text=open all")
    paths = window.evaluate("[...document.querySelectorAll('#modules tbody tr')].map((row) => row.dataset.path)")
    assert {"0", "1", "2", "2.0", "2.1"} <= set(paths)
    assert set(window.locator("#phase option").evaluate_all("all => all.map((one) => one.value)")) == {
        "",
        "forward",
        "backward",
        "optimizer",
    }
    for plot in ("exponents .bin.forward", "exponents .bin.backward", "max .dot", "growth .dot", "error .fill"):
        assert window.locator(f"#plot-{plot}").count() > 0, plot
    window.fill("#words", "2.1.weight")
    named = sum("2.1.weight" in record.operands for record in report.records)
    assert named > 0
    wait_for_text(window.locator("#shown"), f"{named} of {len(report.records)} ops")
    window.click(".sheet .row >> nth=0")
    assert "2.1.weight" in window.inner_text("#details")


def test_the_page_of_a_search_names_the_layer_that_overflows(opened: Opened) -> None:
    model = net()
    with torch.no_grad():
        model[2][1].weight.fill_(30000.0)
    with mezzo.torch.find_nonfinite(model) as found, mezzo.torch.autocast("cpu", dtype=torch.float16):
        model(torch.randn(4, 8))
    window = opened(found.report)
    assert window.inner_text("h1") == "Inf first appears in aten::linear of 2.1"
    assert "test_real_reports.py" in window.inner_text("#verdict")
    assert window.locator("#advice li").count() > 0
