"""One start of the processes for all modules here that are about to be tested."""

from __future__ import annotations

import pickle

import pytest

from .processes import Ranks, run


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What two processes returned for the functions in ``CHECKS`` of each module that is tested in this session.

    Where pytest itself runs in several processes, the first that needs it starts them, and the others wait for the file.
    """
    package = __name__.rpartition(".")[0]
    modules = {item.module.__name__ for item in request.session.items if "ranks" in item.fixturenames}
    wanted = sorted(name for name in modules if name.startswith(f"{package}."))
    if not hasattr(request.config, "workerinput"):  # which is how pytest-xdist marks its workers
        return run(*wanted)
    import fcntl  # which Windows has not

    path = tmp_path_factory.getbasetemp().parent / "ranks.pickle"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(run(*wanted)))
        return pickle.loads(path.read_bytes())  # each process runs with the same tests collected, so wants the same
