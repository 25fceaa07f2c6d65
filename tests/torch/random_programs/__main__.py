"""Programs whose policies leave the casting to PyTorch's own kernels, in a process of their own."""

from __future__ import annotations

from hypothesis import given

from . import program as p
from .comparing import check
from .profile import profile
from .strategies import NATIVE_POLICIES, programs


@profile(150)
@given(programs(NATIVE_POLICIES, default=False))
def check_programs(program: p.Program) -> None:
    check(program)


if __name__ == "__main__":
    check_programs()
