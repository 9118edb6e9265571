"""Reading the pages: fenced blocks, headings, links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = "`" * 3


@dataclass(frozen=True)
class Block:
    """One fenced block; ``info`` is what stands behind the opening fence."""

    page: Path
    line: int
    info: str
    text: str

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info else ""

    @property
    def words(self) -> list[str]:
        return self.info.split()[1:]

    @property
    def needs(self) -> str | None:
        """The module without which the block cannot run, beyond those that the tests need anyway."""
        return next((word.removeprefix("needs=") for word in self.words if word.startswith("needs=")), None)

    @property
    def file_name(self) -> str | None:
        """The name that a first line ``# file: name`` gives the block."""
        match = re.match(r"# file: (\S+)\n", self.text)
        return match[1] if match else None

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Return all pages that describe the library."""
    return [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    start, info, lines = 0, None, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if info is None and line.startswith(FENCE):
            start, info, lines = number, line.removeprefix(FENCE).strip(), []
        elif info is not None and line.rstrip() == FENCE:
            found.append(Block(page, start, info, "\n".join(lines) + "\n"))
            info = None
        elif info is not None:
            lines.append(line)
    assert info is None, f"{page}: a fenced block that begins on line {start} does not end"
    return found


def prose(page: Path) -> str:
    """Return the page without its fenced blocks."""
    return re.sub(rf"^{FENCE}.*?^{FENCE}$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def headings(page: Path) -> list[str]:
    return re.findall(r"^(#{1,6} .*)$", prose(page), flags=re.M)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the page's headings."""
    slugs = set()
    for heading in headings(page):
        text = heading.lstrip("#").strip().lower().replace("`", "")
        slugs.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return slugs


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))
