"""A sample of the sweep whose results are the page docs/mixed-dtypes.md: the page says what raises, and nothing differs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mixed-dtypes.md"
EVERY = 15

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "scripts").is_dir(), reason="the scripts are not part of the source distribution"),
]

# In a process of its own: PyTorch's autocast is to run its own kernels, and here other tests have had some replaced.
SAMPLE = f"""
import json, warnings
from itertools import islice
import torch
from mixed_calls import all_calls
from sweep_dtypes import sweep

torch.set_num_threads(1)
warnings.simplefilter("ignore")
with torch.no_grad():
    found = sweep(islice(all_calls(), 0, None, {EVERY}))
print(json.dumps({{
    "calls": found.calls,
    "functions": sorted(found.ops),
    "torch": dict(found.torch_raises),
    "left": [list(what) for what in found.left],
    "differing": found.differing,
    "narrow": sorted({{text.split(" ((")[0] for text in found.narrow}}),
}}))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    done = subprocess.run(
        [sys.executable, "-c", SAMPLE],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
    )
    return json.loads(done.stdout.splitlines()[-1])


def listed(title: str) -> set[str]:
    """Give the functions that the page lists under a title."""
    if not PAGE.is_file():
        pytest.skip(f"there is no {PAGE.name}; python scripts/sweep_dtypes.py docs/{PAGE.name} writes it")
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    section = next((text for text in sections if text.startswith(title)), "")
    return set(re.findall(r"^\* `([^`]+)`", section, flags=re.MULTILINE))


def test_many_calls_of_many_functions_raise_under_pytorchs_autocast(found: Any) -> None:
    assert found["calls"] > 3000
    assert len(found["functions"]) > 120
    assert sum(found["torch"].values()) > 1000
    assert len(found["torch"]) > 60


def test_no_call_raises_that_the_page_does_not_list(found: Any) -> None:
    unlisted = [what for what in found["left"] if what[0] not in listed("What raises under mezzo")]
    assert unlisted == []


def test_no_call_that_works_differs(found: Any) -> None:
    assert found["differing"] == []


def test_no_repaired_call_has_a_dtype_that_the_page_does_not_explain(found: Any) -> None:
    assert set(found["narrow"]) <= listed("Repaired to another dtype")


def test_what_raises_under_pytorchs_autocast_is_on_the_page(found: Any) -> None:
    listed("")
    rows = set(re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(found["torch"]) <= rows
