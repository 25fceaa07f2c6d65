"""The wheel: what is in it, what it says of itself, and that the core works from it alone."""

from __future__ import annotations

import email.parser
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import mezzo

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = {"torch", "jax", "tensorplay", "cli", "demo", "bench", "test-jax", "dev"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel with the tools that are installed, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path, names: set[str]) -> Message:
    (name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    return email.parser.Parser().parsestr(zipfile.ZipFile(wheel).read(name).decode("utf-8"))


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(names: set[str]) -> None:
    package = ROOT / "src"
    expected = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"mezzo/py.typed", "mezzo/tables/torch/cpu.csv", "mezzo/tables/torch/ops.csv"} <= expected
    assert {"mezzo/tables/jax/xla.csv", "mezzo/tables/jax/ops.csv", "mezzo/tables/jax/aliases.csv"} <= expected
    assert {"mezzo/report/page/page.html", "mezzo/report/page/page.css", "mezzo/report/page/main.js"} <= expected
    information = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - information == expected
    assert [name for name in information if name.endswith("/LICENSE")]


def test_the_wheel_is_for_every_platform(wheel: Path) -> None:
    assert wheel.name == f"mezzo-{mezzo.__version__}-py3-none-any.whl"


def test_nothing_is_required_but_by_an_extra(metadata: Message) -> None:
    requirements = metadata.get_all("Requires-Dist", [])
    assert requirements
    assert [line for line in requirements if "extra ==" not in line] == []
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS


def test_the_metadata_says_what_people_look_for(metadata: Message) -> None:
    assert metadata["Name"] == "mezzo"
    assert metadata["Version"] == mezzo.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_command_is_installed(wheel: Path, names: set[str]) -> None:
    (name,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
    assert "mezzo = mezzo.cli:main" in zipfile.ZipFile(wheel).read(name).decode("utf-8")


def test_the_core_works_from_the_wheel_without_any_other_package(wheel: Path, tmp_path: Path) -> None:
    """``-I -S`` leaves only the standard library."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import mezzo
from mezzo.report import Report
from mezzo.report.html import page
print(mezzo.__version__, mezzo.builtin_policy("unified").rule("F.softmax"), mezzo.__file__)
assert "reportPage" in page(Report("loss", "jax"))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        mezzo.__version__,
        "fp32_set_opt_dtype",
        str(tmp_path / "mezzo" / "__init__.py"),
    ]
