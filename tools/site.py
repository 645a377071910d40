"""Fit the docs to the site: the README as its first page, links out of docs/ as names, GitHub's anchors."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def github_anchor(heading: str, _separator: str) -> str:
    """Return the anchor that GitHub gives to a heading, so that links hold there and here."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the decisions, of which there are more every month."""
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    nav: list[Any] = config.nav or []
    nav.append({"Decisions": [f"decisions/{page.name}" for page in pages]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as the first page."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links to files that are not part of the site into their names; leave code blocks alone."""
    source = page.file.src_uri
    folder = PurePosixPath() if source == "index.md" else PurePosixPath("docs") / PurePosixPath(source).parent
    parts = CODE.split(markdown)
    return "".join(
        part if index % 2 else LINK.sub(lambda found: _link(found, folder), part)
        for index, part in enumerate(parts)
    )


def _link(found: re.Match[str], folder: PurePosixPath) -> str:
    text, target = found[1], found[2]
    path, _, anchor = target.partition("#")
    if re.match(r"[a-z]+:", target) or not path:
        return found[0]
    place = Path(ROOT / folder / path).resolve().relative_to(ROOT)
    if place.parts[0] == "docs" and place.suffix:
        inside = PurePosixPath(place).relative_to("docs")
        up = "../" * (len(folder.parts) - 1) if folder.parts else ""
        return f"[{text}]({up}{inside}{'#' + anchor if anchor else ''})"
    return text if place.name in text else f"{text} (`{place}`)"
