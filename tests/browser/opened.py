"""Pages of reports in a browser, and what went wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezzo.report.html import page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Locator, Page

    from mezzo.report import Report

__all__ = ["Opened", "numbers_in", "rows_in", "wait_for_text"]

PATIENCE = 30_000
"""Milliseconds: a page takes less than one second on a quiet machine; the rest is for a busy one."""


class Opened:
    """Opens reports, each in a window of its own.

    Attributes:
        complaints: What the pages wrote to the console, and errors that nothing caught.
        requests: What the pages asked for, other than themselves.
    """

    def __init__(self, browser: Browser, folder: Path) -> None:
        self.browser = browser
        self.folder = folder
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.contexts: list[BrowserContext] = []

    def __call__(self, report: Report, *, width: int = 1400, **options: Any) -> Page:
        """Open a report; ``options`` are those of a browser context, such as ``color_scheme``."""
        context = self.browser.new_context(viewport={"width": width, "height": 900}, offline=True, **options)
        self.contexts.append(context)
        path = self.folder / f"report{len(self.contexts)}.html"
        path.write_text(page(report), encoding="utf-8")
        window = context.new_page()
        window.set_default_timeout(PATIENCE)
        window.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        window.on("pageerror", lambda error: self.complaints.append(str(error)))
        window.on("request", lambda request: self._note(request.url, path))
        window.goto(path.as_uri())
        if options.get("java_script_enabled", True):
            window.wait_for_selector("body[data-ready]", state="attached")
        return window

    def _note(self, url: str, path: Path) -> None:
        # The empty icon is written in the page itself.
        if url not in (path.as_uri(), "data:,"):
            self.requests.append(url)

    def check(self) -> None:
        """Fail if a page has complained, or has asked for anything."""
        assert self.complaints == []
        assert self.requests == []

    def close(self) -> None:
        """Close all windows."""
        for context in self.contexts:
            context.close()


def wait_for_text(part: Locator, text: str) -> None:
    """Wait until a part of the page has a text: filters of words and the clipboard take their time."""
    from playwright.sync_api import expect

    expect(part).to_have_text(text, timeout=PATIENCE)


def rows_in(window: Page) -> list[int]:
    """The ops that the table has in sight, by their place in the report, from the top."""
    found: list[int] = window.evaluate(
        "[...document.querySelectorAll('.sheet .row')].map((row) => Number(row.dataset.index))"
    )
    return found


def numbers_in(window: Page, selector: str, *names: str) -> list[tuple[float, ...]]:
    """The ``data-`` attributes of all elements that fit a selector, as numbers."""
    script = """([selector, names]) => [...document.querySelectorAll(selector)].map(
        (one) => names.map((name) => Number(one.dataset[name])))"""
    return [tuple(values) for values in window.evaluate(script, [selector, list(names)])]
