"""``mezzo run`` runs a script as Python does: same names, paths, arguments, text, tracebacks and exit status."""

from __future__ import annotations

import json
import signal
import sys
import zipfile
from pathlib import Path
from textwrap import dedent

import pytest

from mezzo.cli.watch_frames import entries, shorten_others

from .run_pairs import MEZZO, PYTHON, run, same

FACTS = """
import json, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "original": sys.orig_argv, "globals": sorted(globals()), "file": __file__,
    "name": __name__, "package": __package__, "spec": __spec__ and __spec__.name, "loader": type(__loader__).__name__,
    "loads": __loader__.name if hasattr(__loader__, "name") else None, "builtins": str(type(__builtins__)),
    "annotations": __annotations__, "main": sys.modules["__main__"].__dict__ is globals(), "doc": __doc__,
    "hook": sys.excepthook is sys.__excepthook__, "typer": "typer" in sys.modules, "rich": "rich" in sys.modules,
    "torch": "torch" in sys.modules, "stdin": sys.stdin.read(), "flags": str(sys.flags),
}))
"""


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(dedent(text), encoding="utf-8")


# What the script finds


@pytest.mark.parametrize("spelling", ["./facts.py", "../{name}/facts.py", "link.py"])
def test_a_script_finds_what_it_finds_under_python(spelling: str, tmp_path: Path) -> None:
    write(tmp_path, facts=FACTS)
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "elsewhere", linked=FACTS)
    (tmp_path / "link.py").symlink_to(tmp_path / "elsewhere" / "linked.py")
    script = spelling.format(name=tmp_path.name)
    status, out, err = same(tmp_path, script, "--help", "-m", "--", "--policy=x", "", stdin="text\n")
    assert (status, err) == (0, "")
    facts = json.loads(out)
    assert facts["argv"] == [script, "--help", "-m", "--", "--policy=x", ""]
    assert facts["stdin"] == "text\n"
    assert (facts["name"], facts["main"], facts["typer"], facts["torch"]) == ("__main__", True, False, False)


@pytest.mark.parametrize("flags", [("-P",), ("-W", "error", "-X", "utf8", "-O")], ids=["safe-path", "others"])
def test_options_of_the_interpreter_hold_for_the_script(flags: tuple[str, ...], tmp_path: Path) -> None:
    write(tmp_path, facts=FACTS)
    _, out, _ = same(tmp_path, "facts.py", "-x", python=(*PYTHON, *flags))
    assert json.loads(out)["original"] == [sys.executable, *flags, "facts.py", "-x"]


@pytest.mark.parametrize("text", [FACTS, "def f(:\n"], ids=["facts", "syntax error"])
def test_the_installed_command_is_no_other(text: str, tmp_path: Path) -> None:
    # Without a frame of the script in the traceback nothing but the runner holds what Python has started with.
    write(tmp_path, facts=text)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "mezzo"
    command.write_text("import sys\nfrom mezzo.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n")
    alone = run((*PYTHON, "facts.py"), tmp_path)
    assert alone[0] == (text != FACTS)
    assert run((*PYTHON, str(command), "run", "--policy", "fp32", "facts.py"), tmp_path) == alone


@pytest.mark.parametrize("name", ["inside.facts", "inside"])
def test_a_module_finds_what_it_finds_under_python(name: str, tmp_path: Path) -> None:
    package = tmp_path / "inside"
    package.mkdir()
    write(package, __init__="", near="VALUE = 7", facts=f"from .near import VALUE\n{FACTS}", __main__=FACTS)
    status, out, err = same(tmp_path, "-m", name, "--lr", "1")
    assert (status, err) == (0, "")
    facts = json.loads(out)
    assert facts["argv"][1:] == ["--lr", "1"]
    assert facts["original"] == [sys.executable, "-m", name, "--lr", "1"]
    assert facts["package"] == "inside"


@pytest.mark.parametrize("kind", ["folder", "zip file"])
def test_a_folder_or_a_zip_file_runs_its_main(kind: str, tmp_path: Path) -> None:
    if kind == "folder":
        (tmp_path / "app").mkdir()
        write(tmp_path / "app", __main__=FACTS)
    else:
        with zipfile.ZipFile(tmp_path / "app", "w") as archive:
            archive.writestr("__main__.py", FACTS)
    status, out, err = same(tmp_path, "app", "a")
    assert (status, err) == (0, "")
    assert json.loads(out)["argv"] == ["app", "a"]


def test_the_scripts_own_rich_and_typer_are_found(tmp_path: Path) -> None:
    write(tmp_path, rich="MINE = 1", typer="MINE = 2", own="import rich, typer\nprint(rich.MINE, typer.MINE)")
    assert same(tmp_path, "own.py") == (0, "1 2\n", "")


def test_a_script_is_read_from_a_pipe(tmp_path: Path) -> None:
    assert same(tmp_path, "/dev/stdin", stdin="import sys\nprint(sys.argv, __file__)\n") == (
        0,
        "['/dev/stdin'] /dev/stdin\n",
        "",
    )


# How it ends

ENDINGS = {
    "normally": "print('out'); sys.stderr.write('err\\n')",
    "exit with a status": "sys.exit(3)",
    "exit with a text": "sys.exit('what went wrong')",
    "exit with an error of its own": "class Mine(SystemExit): code = 9\nraise Mine",
    "exit at once": "print('out', flush=True); os._exit(5)",
    "exception": """
        def outer():
            try:
                inner()
            except ZeroDivisionError as error:
                raise ValueError("outer") from error
        def inner():
            return 1 / 0
        outer()
        """,
    "syntax error": "print('never')\nx = = 1",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT); signal.pause()",
    "signal": "os.kill(os.getpid(), signal.SIGTERM)",
    "atexit": "import atexit\natexit.register(print, 'last')\natexit.register(print, 'first')\nraise ValueError",
    "hook": """
        import traceback
        def hook(kind, error, trace):
            print("hook", kind.__name__, len(traceback.extract_tb(trace)), error.__traceback__ is trace)
            print(sys.last_value is error, sys.last_traceback is trace, sys.excepthook is hook)
        sys.excepthook = hook
        raise ValueError
        """,
    "hook that fails": """
        class Odd(Exception):
            def __setattr__(self, name, value):
                raise TypeError(name)
        def hook(*_):
            raise KeyError("in the hook")
        sys.excepthook = hook
        raise Odd("first")
        """,
    "thread": """
        thread = threading.Thread(target=lambda: 1 / 0, name="t")
        thread.start()
        thread.join()
        """,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_it_does_under_python(ending: str, tmp_path: Path) -> None:
    write(tmp_path, ends="import os, signal, sys, threading\n" + dedent(ENDINGS[ending]))
    status, _, err = same(tmp_path, "ends.py")
    wanted = {"normally": 0, "exit with a status": 3, "exit with an error of its own": 9, "exit at once": 5}
    wanted |= {"interrupt": -signal.SIGINT, "signal": -signal.SIGTERM, "thread": 0}
    assert status == wanted.get(ending, 1)
    assert "mezzo" not in err


def test_an_exception_that_lets_nothing_be_set_is_shortened_as_others() -> None:
    class OddError(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            raise TypeError(name)

    error = ValueError("outer")
    try:
        raise OddError
    except OddError as inner:
        error.__cause__ = inner
    shorten_others(error)
    assert error.__cause__ is not None
    assert len([*entries(error.__cause__.__traceback__)]) == 1


def test_a_module_that_fails_has_the_traceback_of_python(tmp_path: Path) -> None:
    write(tmp_path, fails="def f():\n    raise ValueError('deep')\n\nf()\n")
    status, _, err = same(tmp_path, "-m", "fails")
    assert status == 1
    assert err.endswith("ValueError: deep\n")


def test_a_module_that_is_not_there_is_reported_as_by_python(tmp_path: Path) -> None:
    assert same(tmp_path, "-m", "no_such_module") == (1, "", f"{sys.executable}: No module named no_such_module\n")


@pytest.mark.parametrize("error", ["ImportError('no torch here')", "OSError('libcudart.so.12: cannot open')"])
def test_a_torch_that_cannot_be_imported_fails_as_under_python(error: str, tmp_path: Path) -> None:
    # The runner waits for this import, and is on the stack while it fails.
    write(tmp_path, torch=f"raise {error}\n", uses="def f():\n    import torch\n\nf()\n")
    status, _, err = same(tmp_path, "uses.py")
    assert status == 1
    assert 'torch.py", line 1, in <module>' in err


# Processes of its own


def test_classes_of_the_script_go_through_pickle_and_to_processes_of_each_kind(tmp_path: Path) -> None:
    write(
        tmp_path,
        starts="""
            import multiprocessing, pickle, sys

            class Point:
                def __init__(self, x):
                    self.x = x

            def double(point):
                return Point(2 * point.x)

            if __name__ == "__main__":
                print(type(pickle.loads(pickle.dumps(Point(1)))) is Point, Point.__module__)
                for kind in ("fork", "spawn"):
                    with multiprocessing.get_context(kind).Pool(1) as pool:
                        print(kind, [point.x for point in pool.map(double, [Point(1), Point(2)])])
            """,
    )
    lines = ["True __main__", "fork [2, 4]", "spawn [2, 4]"]
    assert same(tmp_path, "starts.py") == (0, "\n".join(lines) + "\n", "")


def test_what_a_script_starts_is_started_by_its_own_command_line(tmp_path: Path) -> None:
    # Launchers start themselves again by what `sys.orig_argv` holds.
    write(
        tmp_path,
        again="""
            import os, subprocess, sys
            print("child" if os.environ.get("CHILD") else "parent", sys.argv, flush=True)
            if not os.environ.get("CHILD"):
                subprocess.run(sys.orig_argv, env={**os.environ, "CHILD": "1"}, check=True)
            """,
    )
    lines = ["parent ['again.py', '-x']", "child ['again.py', '-x']"]
    assert same(tmp_path, "again.py", "-x") == (0, "\n".join(lines) + "\n", "")


def test_a_pipe_that_is_closed_early_is_the_scripts_own_affair(tmp_path: Path) -> None:
    write(tmp_path, much="for i in range(100_000):\n    print(i)\n")
    first = " ".join([*PYTHON, "much.py"])
    second = " ".join([*MEZZO, "much.py"])
    seen = [
        run(("bash", "-c", f"{command} | head -1; echo ${{PIPESTATUS[0]}}"), tmp_path) for command in (first, second)
    ]
    assert seen[0] == seen[1]
    assert seen[0][1].startswith("0\n")
