"""The built pages of `insitu view` are those of the sources, small, and fit for a strict CSP."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "web"
PAGES = ROOT / "src" / "insitu" / "view" / "pages"
BUILT = {"app.css", "app.js", "icon.svg", "index.html", "sources.sha256"}
SINGLE = ("digest.mjs", "index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.ts")
MAX_GZIPPED = 200_000
BUILD = "run `make web` and commit src/insitu/view/pages"


def _digest() -> str:
    """Compute what web/digest.mjs writes at the end of a build."""
    inside = [path for folder in ("public", "src") for path in (WEB / folder).rglob("*") if path.is_file()]
    names = [*SINGLE, *(path.relative_to(WEB).as_posix() for path in inside)]
    digest = hashlib.sha256()
    for name in sorted(names):
        content = (WEB / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def test_built_files_are_those_of_the_sources() -> None:
    assert {path.name for path in PAGES.iterdir()} == BUILT, BUILD
    assert (PAGES / "sources.sha256").read_text().strip() == _digest(), BUILD


def test_pages_are_small() -> None:
    sizes = {path.name: len(gzip.compress(path.read_bytes(), mtime=0)) for path in PAGES.iterdir()}
    assert sum(sizes.values()) < MAX_GZIPPED, sizes


def test_the_page_has_nothing_inline_and_loads_from_its_own_origin_only() -> None:
    page = (PAGES / "index.html").read_text()
    assert re.findall(r"<script\b[^>]*>(.*?)</script>", page, re.S) == [""]
    assert not re.search(r"<style\b|\sstyle=|\son\w+=|javascript:|data:", page)
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {"./app.js", "./app.css", "./icon.svg"}
    for name in ("app.js", "app.css"):
        text = (PAGES / name).read_text()
        outside = set(re.findall(r"https?://[\w./-]+", text)) - {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1999/xhtml",
            "http://www.w3.org/1998/Math/MathML",
        }
        assert not outside, f"{name} names {outside}"
        assert "@import" not in text
        assert "eval(" not in text


MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc"
    r"|new Function|\beval\(|javascript:",
    re.IGNORECASE,
)


def test_model_output_is_never_parsed_as_markup() -> None:
    sources = {path: path.read_text() for path in (WEB / "src").rglob("*.ts*")}
    assert len(sources) > 20
    found = {path.name: MARKUP.findall(text) for path, text in sources.items() if MARKUP.search(text)}
    assert not found, f"show texts as text nodes: {found}"


def test_the_lock_names_no_host() -> None:
    lock = json.loads((WEB / "package-lock.json").read_text())
    assert lock["packages"], "the lock is empty"
    named = [name for name, package in lock["packages"].items() if "resolved" in package]
    assert not named, "npm install --omit-lockfile-registry-resolved leaves the addresses out"
    # Binaries of other platforms are optional: only their versions are known.
    needed = {
        name: package for name, package in lock["packages"].items() if name and not package.get("optional")
    }
    assert [name for name, package in needed.items() if not package.get("integrity")] == []
