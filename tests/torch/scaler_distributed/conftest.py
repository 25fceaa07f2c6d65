"""One start of the processes for all modules here that are about to be tested."""

from __future__ import annotations

import pytest

from .processes import Ranks, run


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """What two processes returned for the functions in ``CHECKS`` of each module that is tested in this session."""
    package = __name__.rpartition(".")[0]
    modules = {item.module.__name__ for item in request.session.items if "ranks" in item.fixturenames}
    return run(*sorted(name for name in modules if name.startswith(f"{package}.")))
