"""A real browser, started once for the folder. Without one these tests are skipped, or fail where one is required."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .opened import Opened
from .sample import sample

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# No update, no reports, no first-run pages: the browser is to ask the network for nothing either.
ARGUMENTS = (
    "--headless",
    "--no-sandbox",  # as root, where continuous integration runs; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def _missing(what: str) -> None:
    if os.environ.get("MEZZO_BROWSER_REQUIRED") == "1":
        pytest.fail(f"MEZZO_BROWSER_REQUIRED=1 and {what}")
    pytest.skip(what)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        _missing("playwright is not installed: pip install playwright")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        _missing(f"no browser is on PATH (looked for {', '.join(PROGRAMS)}): apt-get install chromium")
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        yield started
        started.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Opened]:
    """What opens a page; at the end of the test no page may have complained or asked for anything."""
    made = Opened(browser, tmp_path)
    yield made
    made.close()
    made.check()


@pytest.fixture(scope="module")
def _sample_opened(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Opened, Page]]:
    made = Opened(browser, tmp_path_factory.mktemp("sample"))
    yield made, made(sample())
    made.close()


@pytest.fixture
def window(_sample_opened: tuple[Opened, Page]) -> Iterator[Page]:
    """The sample's page as it is when it has just been loaded, in one window: to open another takes three times as long."""
    made, page = _sample_opened
    page.reload()
    page.wait_for_selector("body[data-ready]", state="attached")
    yield page
    made.check()
