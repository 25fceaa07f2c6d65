"""Put the stand-in accelerator of the examples in place, and give it AMP: once, for the process of these tests."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from mezzo.torch import register_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import standin_backend

register_accelerator(standin_backend.NAME, dtypes=[torch.float16, torch.bfloat16])
