"""Reading the documents: their code blocks, headings and links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

_NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
_FENCE = re.compile(r"^ *```(\w*)$")
_PROMISE = re.compile(r"^\s*print\(.*\)  # (.+)$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    language: str
    line: int
    text: str
    run: bool


def blocks(document: Path) -> list[Block]:
    """Give the fenced blocks of a document, in order."""
    found: list[Block] = []
    lines = document.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if start is None:
            start = number
            continue
        language = _FENCE.match(lines[start]).group(1)  # type: ignore[union-attr]
        marked = start > 0 and _NOT_RUN.fullmatch(lines[start - 1].strip()) is not None
        found.append(Block(language, start + 2, "\n".join(lines[start + 1 : number]) + "\n", not marked))
        start = None
    assert start is None, f"{document.name}: the block that starts in line {start} does not end"
    return found


def python_program(document: Path) -> str:
    """Join a document's Python blocks into one program whose line numbers are the document's."""
    program: list[str] = []
    for block in blocks(document):
        if block.language == "python" and block.run:
            program += [""] * (block.line - 1 - len(program)) + block.text.splitlines()
    return "\n".join(program) + "\n"


def promised_output(program: str) -> list[str]:
    """Give what a program says that it prints: the comments after its prints."""
    return [text.strip() for text in _PROMISE.findall(program)]


def commands(document: Path) -> list[tuple[str, list[str]]]:
    """Give the commands in a document's console blocks, each with the lines of output that the document shows."""
    found: list[tuple[str, list[str]]] = []
    for block in blocks(document):
        if block.language != "console" or not block.run:
            continue
        for line in block.text.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            elif line.strip() and line.strip() != "..." and found:
                found[-1][1].append(line.strip())
    return found


def write_files(document: Path, folder: Path) -> None:
    """Write the TOML files that a document shows, those whose first line is a comment with their name."""
    for block in blocks(document):
        first, _, _ = block.text.partition("\n")
        if block.language == "toml" and re.fullmatch(r"# [\w-]+\.toml", first):
            (folder / first.removeprefix("# ")).write_text(block.text, encoding="utf-8")


def links(document: Path) -> list[str]:
    """Give the targets of a document's links that are not on the web."""
    text = re.sub(r"^ *```.*?^ *```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    targets = [inline or image for inline, image in _LINK.findall(text)]
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(document: Path) -> set[str]:
    """Give the anchors of a document's headings, as they are shown on the web."""
    text = re.sub(r"^ *```.*?^ *```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
