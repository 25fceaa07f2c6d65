"""The order of the files: those that take longest come first, so that no worker is left alone with one at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["SLOW", "slow_files_first"]

HERE = Path(__file__).parent

SLOW = """
examples/test_examples.py
packaging/test_documents.py
torch/test_accelerator_suite.py
apex/test_scripts.py
examples/test_apex_examples.py
torch/test_agreement_opinfo.py
test_tensorplay_suite.py
test_tensorplay_folders.py
torch/test_compile_tokens.py
demo/test_demo_training.py
demo/test_demo_jax.py
benchmarks/test_apex_front.py
torch/scaler_parts/test_scaler_compile.py
torch/test_register_accelerator.py
torch/scaler/test_parity.py
torch/random_programs/test_random_programs.py
benchmarks/test_prepared.py
torch/test_casts_in_fresh_processes.py
benchmarks/test_command.py
apex/test_distributed_no_sync.py
torch/scaler_distributed/test_agreement.py
torch/test_compile.py
apex/test_distributed.py
torch/prepare/test_fsdp.py
jax/transforms/test_hard_cases.py
torch/test_after_other_policies.py
torch/test_kept_casts.py
torch/test_sweep.py
""".split()
"""Files that take more than twelve seconds, the slowest first, below the folder of this one."""


def slow_files_first(items: list[pytest.Item]) -> None:
    """Put the tests of slow files before all others; the order is otherwise as it was."""
    place = {HERE / name: index for index, name in enumerate(SLOW)}
    items.sort(key=lambda item: place.get(item.path, len(SLOW)))
