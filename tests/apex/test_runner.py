"""``python -m mezzo.apex script.py`` runs a script as Python does, with `apex` to be found by it and by what it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mezzo.apex import runner, stand_in

from .running import STAND_IN, output, python

REPORT = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "first": sys.path[0], "package": __package__, "doc": __doc__,
    "spec": getattr(__spec__, "name", None), "loader": type(__loader__).__name__, "builtins": type(__builtins__).__name__,
    "main": sys.modules["__main__"].__dict__ is globals(), "names": sorted(globals()), "flags": str(sys.flags),
    "path": sorted(p for p in sys.path[1:] if "shim" not in p), "stdin": sys.stdin.read(),
}))
"""


def report(*arguments: str | Path, **options: object) -> dict[str, object]:
    done = python(*arguments, stdin="typed\n", **options)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "inner" / "script.py"
    path.parent.mkdir()
    path.write_text('"""What it is."""\n' + REPORT)
    return path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# The process that a script sees


@pytest.mark.parametrize("arguments", [[], ["a", "--dtype", "bfloat16", "-m", "--help", "--", "x y"]], ids=str)
@pytest.mark.parametrize("way", ["relative", "absolute", "up and down", "symbolic link"])
def test_a_script_sees_what_it_sees_without_the_runner(script: Path, way: str, arguments: list[str]) -> None:
    names = {"relative": "inner/script.py", "absolute": str(script), "up and down": "./inner/../inner/script.py"}
    if way == "symbolic link":
        (script.parent.parent / "link.py").symlink_to(script)
    name, folder = names.get(way, "link.py"), script.parent.parent
    plain = report(name, *arguments, cwd=folder)
    assert report(*STAND_IN, name, *arguments, cwd=folder) == plain
    assert (plain["argv"], plain["first"], plain["stdin"]) == ([name, *arguments], str(script.parent), "typed\n")


@pytest.mark.parametrize("name", ["package.script", "package", "single"])
def test_a_module_sees_what_it_sees_without_the_runner(tmp_path: Path, name: str) -> None:
    for path in ("package/__init__.py", "package/script.py", "package/__main__.py", "single.py"):
        write(tmp_path / path, "" if "init" in path else REPORT)
    plain = report("-m", name, "-m", "x", cwd=tmp_path)
    assert report(*STAND_IN, "-m", name, "-m", "x", cwd=tmp_path) == plain
    assert plain["first"] == str(tmp_path)


def test_without_the_unsafe_first_path_none_is_added(script: Path) -> None:
    found = report("-P", *STAND_IN, script)
    assert found["first"] == stand_in.FOLDER
    assert str(script.parent) not in found["path"]  # type: ignore[operator]


def test_the_stand_in_comes_after_the_scripts_own_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "script.py", "import sys; print(sys.path[:2])")
    assert output(path) == f"{[str(tmp_path), stand_in.FOLDER]}\n"


# How it ends


@pytest.mark.parametrize(
    ("ending", "code", "stderr"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('reason')", 1, "reason\n"),
        ("raise SystemExit(4)", 4, ""),
        ("os._exit(5)", 5, ""),
        ("atexit.register(print, 'at exit', file=sys.stderr)", 0, "at exit\n"),
    ],
    ids=str,
)
def test_the_exit_code_is_the_scripts(tmp_path: Path, ending: str, code: int, stderr: str) -> None:
    path = write(tmp_path / "script.py", f"import atexit, os, sys\n{ending}\n")
    done = python(*STAND_IN, path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", stderr)


FAILING = """
def outer():
    try:
        {}["missing"]
    except KeyError as error:
        raise ValueError("wrong") from error
outer()
"""


@pytest.mark.parametrize(
    "text", [FAILING, "x = (\n", "raise KeyboardInterrupt", "b'\\xff' = 1", "import no_such_module"]
)
def test_a_traceback_is_the_one_without_the_runner(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "script.py", text)
    plain, here = python(path), python(*STAND_IN, path)
    assert here.stderr == plain.stderr
    assert here.returncode == plain.returncode != 0
    assert "mezzo" not in here.stderr


def test_a_hook_that_the_script_sets_gets_its_exception(tmp_path: Path) -> None:
    text = "import sys\nsys.excepthook = lambda kind, value, trace: print(kind.__name__, value)\nraise ValueError('wrong')\n"
    done = python(*STAND_IN, write(tmp_path / "script.py", text))
    assert (done.returncode, done.stdout, done.stderr) == (1, "ValueError wrong\n", "")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to send")
def test_a_signal_ends_the_script_itself(tmp_path: Path) -> None:
    """No process stands between the caller and the script."""
    path = write(tmp_path / "script.py", "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    with subprocess.Popen([sys.executable, *STAND_IN, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
        assert time.monotonic() - start < 20


# The command line


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_shown_without_a_script(option: str) -> None:
    text = output(option)
    for part in ("usage: python -m mezzo.apex", "--dtype", "-m module", "torchrun"):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which script is to be run?"),
        (["missing.py"], "the script 'missing.py' does not exist (looked in "),
        (["."], "the script '.' is a folder, and not a script"),
        (["-m"], "-m is followed by the name of a module."),
        (["-m", "no_such_module"], "there is no module 'no_such_module' that could be run."),
        (["-m", "json.no_such_module"], "there is no module 'json.no_such_module' that could be run."),
        (["-m", "no_such.module"], "there is no module 'no_such.module' that could be run."),
        (["-m", "xml"], "there is no module 'xml.__main__' that could be run."),
        (["--opt-level", "O1", "x.py"], "there is no option '--opt-level'; options of the script come after its name."),
        (["--dtype"], "--dtype is float16 or bfloat16, got ''."),
        (["--dtype", "float8", "x.py"], "--dtype is float16 or bfloat16, got 'float8'."),
        (["--dtype=O1", "x.py"], "--dtype is float16 or bfloat16, got 'O1'."),
    ],
    ids=str,
)
def test_a_command_line_that_cannot_be_run_is_explained(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sys.argv[:], sys.path[:], dict(os.environ), sys.modules["__main__"], sys.excepthook, sys.meta_path[:]
    assert runner.main(arguments) == 2
    after = sys.argv[:], sys.path[:], dict(os.environ), sys.modules["__main__"], sys.excepthook, sys.meta_path[:]
    assert after == before
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"python -m mezzo.apex: {message}")
    assert said.err.endswith("(script.py | -m module) [arguments ...]\n")


def test_a_missing_script_ends_with_2() -> None:
    assert python(*STAND_IN, "missing.py").returncode == 2


def test_an_error_in_the_parent_package_of_a_module_is_shown(tmp_path: Path) -> None:
    write(tmp_path / "package" / "__init__.py", "import no_such_module")
    write(tmp_path / "package" / "script.py", "")
    done = python(*STAND_IN, "-m", "package.script", cwd=tmp_path)
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stderr


@pytest.mark.parametrize("given", [["--dtype", "bfloat16"], ["--dtype=bfloat16"]], ids=str)
def test_the_dtype_is_for_the_script_and_its_children(tmp_path: Path, given: list[str]) -> None:
    text = """
import os, subprocess, sys
print(os.environ["MEZZO_APEX_DTYPE"], flush=True)
subprocess.run([sys.executable, "-c", "import os; print(os.environ['MEZZO_APEX_DTYPE'])"], check=True)
"""
    assert output(*given, write(tmp_path / "script.py", text), "--dtype", "float16") == "bfloat16\nbfloat16\n"


def test_without_the_option_the_environments_dtype_stays(tmp_path: Path) -> None:
    path = write(tmp_path / "script.py", "import os; print(os.environ.get('MEZZO_APEX_DTYPE'))")
    assert output(path) == "None\n"
    assert output(path, environment={"MEZZO_APEX_DTYPE": "bfloat16"}) == "bfloat16\n"


# Processes that the script starts. The part of Apex that needs no PyTorch is enough to see what they find.

CHILDREN = """
import multiprocessing, os, subprocess, sys

def work(number):
    from apex.multi_tensor_apply import multi_tensor_applier
    print(number, __name__, multi_tensor_applier.available, flush=True)

if __name__ == "__main__":
    method = sys.argv[1]
    if method == "subprocess":
        code = "from apex.multi_tensor_apply import multi_tensor_applier as one; print(one.available)"
        subprocess.run([sys.executable, "-c", code], check=True)
    else:
        process = multiprocessing.get_context(method).Process(target=work, args=(7,))
        process.start()
        process.join()
        assert process.exitcode == 0
"""


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("subprocess", "False\n"),
        ("spawn", "7 __mp_main__ False\n"),
        ("forkserver", "7 __mp_main__ False\n"),
        ("fork", "7 __main__ False\n"),
    ],
)
@pytest.mark.parametrize("way", ["script", "module"])
def test_processes_that_the_script_starts_find_the_stand_in(
    tmp_path: Path, method: str, expected: str, way: str
) -> None:
    path = write(tmp_path / "inner" / "script.py", CHILDREN)
    what: list[str | Path] = [path] if way == "script" else ["-m", "script"]
    # From Python 3.12 on, fork warns where there are threads; there are none.
    assert output(*what, method, cwd=path.parent) == expected


def test_what_was_in_the_path_of_the_environment_stays_in_it(tmp_path: Path) -> None:
    write(tmp_path / "theirs" / "of_the_environment.py", "print('found')")
    code = "import of_the_environment, sys, os; print(os.environ['PYTHONPATH'])"
    text = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}], check=True)\n"
    theirs = str(tmp_path / "theirs")
    said = output(write(tmp_path / "script.py", text), environment={"PYTHONPATH": theirs})
    assert said == f"found\n{os.pathsep.join([stand_in.FOLDER, theirs])}\n"


def test_a_runner_inside_of_a_runner_adds_nothing(tmp_path: Path) -> None:
    text = """
import os, runpy, subprocess, sys
print(sum(one.endswith("shim") for one in sys.path), os.environ["PYTHONPATH"].count("shim"), flush=True)
if len(sys.argv) == 1:
    subprocess.run([sys.executable, "-m", "mezzo.apex", __file__, "inner"], check=True)
"""
    assert output(write(tmp_path / "script.py", text)) == "1 1\n1 1\n"


def test_objects_of_the_script_can_be_pickled_and_found_after_it_has_ended(tmp_path: Path) -> None:
    text = """
import atexit, pickle

class Mine:
    pass

atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Mine()))).__module__))
"""
    assert output(write(tmp_path / "script.py", text)) == "__main__\n"


def test_starting_imports_no_framework(tmp_path: Path) -> None:
    text = "import sys, apex; print(sorted({'torch', 'numpy', 'typer', 'rich'} & set(sys.modules)))"
    assert output(write(tmp_path / "script.py", text)) == "[]\n"
