"""``mezzo run`` with PyTorch: the script does and prints the same, and the report comes after it: on stderr, in a file."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from .run_pairs import PYTHON, Seen, run

MEZZO = (sys.executable, "-m", "mezzo", "run")

# With what may come in the way: a worker process, another folder to work in, text on both streams, an exit status.
TRAINING = """
    import atexit, os, sys
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
            self.head = nn.Linear(16, 4)

        def forward(self, x):
            return self.head(self.body(x))

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            return torch.full((8,), float(index)).sin(), index % 4

    def main():
        os.chdir(sys.argv[1])
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for x, y in torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True, num_workers=1):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = net(x)
                loss = nn.functional.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(out.dtype, loss.item(), torch.rand(()).item())
        print("to stderr", file=sys.stderr)
        atexit.register(print, "at exit", file=sys.stderr)
        raise RuntimeError("at the end")

    if __name__ == "__main__":
        main()
    """


def write(folder: Path, text: str) -> None:
    (folder / "train.py").write_text(dedent(text), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("training")
    write(path, TRAINING)
    (path / "elsewhere").mkdir()
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> Seen:
    return run((*PYTHON, "train.py", "elsewhere"), folder)


@pytest.fixture(scope="module")
def explained(folder: Path) -> Seen:
    options = ("--explain", "--numerics", "--find-nonfinite", "--lint", "--report", "out.json")
    return run((*MEZZO, *options, "train.py", "elsewhere"), folder)


def test_status_and_output_are_the_scripts_to_the_last_digit(alone: Seen, explained: Seen) -> None:
    assert alone[0] == 1
    assert len(alone[1].splitlines()) == 5
    assert explained[:2] == alone[:2]


def test_the_report_follows_what_the_script_wrote_to_stderr(alone: Seen, explained: Seen, folder: Path) -> None:
    assert alone[2].endswith("RuntimeError: at the end\nat exit\n")
    assert explained[2].startswith(alone[2])
    text = explained[2].removeprefix(alone[2])
    assert "train.py: bfloat16" in text
    files = [f"mezzo: the report is in {folder / name}" for name in ("out.json", "out.nonfinite.json")]
    assert text.splitlines()[-3:-2] + files == text.splitlines()[-3:]
    assert (
        " ops ran before the script broke off; their results were finite\nnote: the script ended with RuntimeError\n"
        in text
    )
    assert "all finite" not in text


def test_the_file_names_the_modules_and_lines_of_the_first_three_steps(explained: Seen, folder: Path) -> None:
    report = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    assert report["title"] == "train.py"
    ops = report["regions"][0]["ops"]
    linear = [op for op in ops if op["op"] == "aten::linear"]
    assert [op["path"] for op in linear] == 3 * ["body.0", "head"]
    assert {op["file"] for op in linear} == {str(folder / "train.py")}
    assert {op["phase"] for op in ops} == {"forward", "backward", "optimizer"}
    assert report["notes"][-2:] == [
        "recorded to the end of step 3 of an optimizer",
        "the script ended with RuntimeError",
    ]
    assert not [note for note in report["notes"] if "could not" in note or "failed" in note]
    assert all(op["numbers"] for op in linear)


NONFINITE = """
    import sys
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x):
            return self.layers[1](self.layers[0](x)).mul(0).log()

    def main():
        torch.manual_seed(0)
        net = Net()
        with torch.autocast("cpu"):
            out = net(torch.randn(3, 4))
        out.mean().backward()
        print(out.dtype)
        sys.exit(6)

    main()
    """


@pytest.fixture(scope="module")
def second_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Seen]:
    folder = tmp_path_factory.mktemp("nonfinite")
    write(folder, NONFINITE)
    (folder / "train.py").rename(folder / "net.py")
    (folder / "mine.toml").write_text('name = "mine"\n[ops]\nlinear = "fp32"\n', encoding="utf-8")
    options = ("--find-nonfinite", "--explain", "--policy", "mine.toml", "--report", "out.json", "-m", "net")
    return folder, run((*MEZZO, *options), folder, environment={"RANK": "1", "WORLD_SIZE": "2"})


def test_each_rank_writes_files_of_its_own_one_for_each_tool(second_rank: tuple[Path, Seen]) -> None:
    folder, (status, _, _) = second_rank
    assert status == 6
    files = {path.name for path in folder.glob("out*")}
    assert files == {"out.rank1.json", "out.rank1.nonfinite.json"}
    assert json.loads((folder / "out.rank1.json").read_text(encoding="utf-8"))["title"] == "net"


def test_a_policy_steers_the_regions_of_the_script(alone: Seen, second_rank: tuple[Path, Seen]) -> None:
    folder, (_, out, _) = second_rank
    assert {line.split()[0] for line in alone[1].splitlines()} == {"torch.bfloat16"}
    assert out == "torch.float32\n"
    (region,) = json.loads((folder / "out.rank1.json").read_text(encoding="utf-8"))["regions"]
    assert region["settings"]["policy"] == "mine"
    assert {op["rule"] for op in region["ops"] if op["op"] == "aten::linear"} == {"fp32"}


def test_another_rank_than_the_first_shows_only_what_is_not_finite(second_rank: tuple[Path, Seen]) -> None:
    folder, (_, _, err) = second_rank
    assert err.startswith("-Inf first appears in log of (Net), forward pass")
    assert "net: " not in err
    first = json.loads((folder / "out.rank1.nonfinite.json").read_text(encoding="utf-8"))["first"]
    assert (first["op"], first["file"]) == ("aten::log", str(folder / "net.py"))


def test_a_script_without_torch_imports_none(tmp_path: Path) -> None:
    write(tmp_path, "import sys\nprint('torch' in sys.modules, 'rich' in sys.modules)\n")
    status, out, err = run((*MEZZO, "--explain", "--find-nonfinite", "--lint", "train.py"), tmp_path)
    assert (status, out) == (0, "False False\n")
    assert err == NOTHING


NOTHING = "mezzo: the script has not imported torch, so there is nothing to report\n"


def test_a_report_can_be_written_after_a_script_that_has_a_rich_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "import rich\nprint(rich.MINE)\n")
    (tmp_path / "rich.py").write_text("MINE = 1\n")
    assert run((*MEZZO, "--explain", "train.py"), tmp_path) == (0, "1\n", NOTHING)


@pytest.mark.parametrize("closed", ["sys.stderr.close()", "os.close(2)", "sys.stderr = None"])
def test_without_a_stderr_the_report_is_left_out(closed: str, tmp_path: Path) -> None:
    write(tmp_path, f"import os, sys\nprint('out', flush=True)\n{closed}\nsys.exit(3)\n")
    status, out, err = run((*MEZZO, "--explain", "train.py"), tmp_path)
    assert (status, out) == (3, "out\n")
    # A script that hides `sys.stderr` from itself has not closed it.
    assert err == (NOTHING if closed == "sys.stderr = None" else "")


def test_an_interrupted_script_ends_by_the_signal_after_its_report(tmp_path: Path) -> None:
    write(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    status, out, err = run((*MEZZO, "--explain", "train.py"), tmp_path)
    assert (status, out) == (-signal.SIGINT, "")
    assert err.endswith(f"KeyboardInterrupt\n{NOTHING}")


def test_a_process_that_the_script_has_forked_reports_nothing(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        import os, sys
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        print("parent" if child else "child", flush=True)
        """,
    )
    status, out, err = run((*MEZZO, "--explain", "train.py"), tmp_path)
    assert (status, out) == (0, "child\nparent\n")
    assert err.count("mezzo:") == 1


FAILING = """
    {imports}

    net = torch.nn.Linear(4, 4)

    def shapes():
        with autocast("cpu", dtype=torch.float16):
            first = net(torch.full((2, 4), 1e38))
            print(first.isfinite().any().item())
        try:
            net(torch.ones(2, 5))
        except RuntimeError:
            return torch.ones(3).add(torch.ones(4))

    shapes()
    """


def lines_of_traceback(text: str) -> list[str]:
    """Leave out the frames in which PyTorch calls a module: it does so in another way where global hooks are."""
    lines, kept = text.splitlines(), True
    shown = []
    for line in lines:
        if not line.startswith("    "):
            kept = "nn/modules/module.py" not in line
        if kept:
            shown.append(line)
    return shown


@pytest.mark.parametrize(
    "imports",
    ["import mezzo.torch; import torch; autocast = torch.autocast", "from mezzo.torch import autocast; import torch"],
    ids=["the package", "a name of it"],
)
def test_a_script_that_imports_mezzo_first_is_watched_and_its_traceback_is_its_own(
    imports: str, tmp_path: Path
) -> None:
    write(tmp_path, FAILING.format(imports=imports))
    alone = run((*PYTHON, "train.py"), tmp_path)
    status, out, err = run((*MEZZO, "--find-nonfinite", "--explain", "train.py"), tmp_path)
    assert (status, out) == alone[:2] == (1, "False\n")
    expected = lines_of_traceback(alone[2])
    assert len([line for line in expected if "RuntimeError: " in line]) == 2
    assert lines_of_traceback(err)[: len(expected)] == expected
    assert "Inf first appears in linear (as _to_copy) of (Linear), forward pass" in err
    assert err.endswith("note: the script ended with RuntimeError\n")
    assert "fault of mezzo" not in err
