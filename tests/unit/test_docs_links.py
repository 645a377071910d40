"""Every relative link of the README and the docs leads to a file, and every anchor to a heading."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


@cache
def prose(path: Path) -> str:
    return CODE.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page; repeated ones are numbered."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.*)", prose(path), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = sum(1 for each in found if re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", each))
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


def dead_links(page: Path) -> list[str]:
    """Links of a page to files or headings that do not exist."""
    dead: list[str] = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        path = (page.parent / target).resolve() if target else page
        known = path.exists() and (not anchor or (path.suffix == ".md" and anchor in anchors(path)))
        if not known:
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead_links(page)


def test_pages_that_the_code_names_exist() -> None:
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"\bdocs/[\w/-]+\.md\b", text)}
    assert named
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def test_modules_and_tests_that_the_security_page_names_exist() -> None:
    named = set(re.findall(r"`((?:src|tests)/[\w/.]+)`", prose(ROOT / "SECURITY.md")))
    assert len(named) > 20
    assert not [name for name in sorted(named) if not (ROOT / name).is_file()]


def test_every_page_is_reachable_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[^)#]+)", prose(ROOT / "README.md")))
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= linked


def test_dead_links_and_anchors_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# A `heading`: one\n\n# Two\n\n## Two\n\n```\n# no heading\n```\n")
    good = "[a](other.md) [b](other.md#a-heading-one) [c](other.md#two-1) [d](#here) [e](https://x.org/#y)"
    page.write_text(f"# Here\n\n{good}\n\n[f](gone.md) [g](other.md#no-heading) [h](#there)\n")
    assert dead_links(page) == ["gone.md", "other.md#no-heading", "#there"]
