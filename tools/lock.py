"""Write requirements/light.lock: every package of `pip install insitu`, pinned, with the hashes of its files.

    python tools/lock.py

pip resolves the dependencies of pyproject.toml under constraints.txt, here, for this platform. The hashes are
those of all files that PyPI has of each version, so that the lock also serves other platforms.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.utils import canonicalize_name as canonical

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "light.lock"
INDEX = "https://pypi.org/simple"
HEADER = """\
# The light install, with hashes: pip install --require-hashes -r requirements/light.lock
# Resolved on Linux with Python 3.11. Written by `make lock` from pyproject.toml and constraints.txt.
"""
_RESOLVE_SECONDS = 900
_INDEX_SECONDS = 60


def main() -> None:
    """Resolve, look up the hashes, write the file."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = [item["metadata"] for item in resolve(wanted)["install"]]
    hashes = {canonical(one["name"]): file_hashes(one["name"], one["version"]) for one in found}
    LOCK.parent.mkdir(exist_ok=True)
    LOCK.write_text(locked(wanted, found, hashes))
    print(f"{LOCK.relative_to(ROOT)}: {len(found)} packages")


def resolve(wanted: Iterable[str]) -> dict[str, Any]:
    """Return pip's report of what it would install into an empty environment."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "--constraint", str(ROOT / "constraints.txt"), *wanted]
        subprocess.run(command, check=True, timeout=_RESOLVE_SECONDS)
        return json.loads(report.read_text())


def locked(
    wanted: Iterable[str], found: Iterable[Mapping[str, Any]], hashes: Mapping[str, Iterable[str]]
) -> str:
    """Return the content of the lock."""
    versions = {canonical(one["name"]): one["version"] for one in found}
    users: dict[str, set[str]] = {name: set() for name in versions}
    for requirement in map(Requirement, wanted):
        users[canonical(requirement.name)].add("insitu")
    for one in found:
        for requirement in map(Requirement, one.get("requires_dist", [])):
            name = canonical(requirement.name)
            # Without extras: a package that only an extra brings is named by who asked for the extra.
            if name in users and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                users[name].add(canonical(one["name"]))
    parts = [HEADER]
    for name, version in sorted(versions.items()):
        lines = [f"{name}=={version}", *(f"    --hash=sha256:{one}" for one in sorted(hashes[name]))]
        parts.append(" \\\n".join(lines) + f"\n    # via {', '.join(sorted(users[name]))}\n")
    return "".join(parts)


def file_hashes(name: str, version: str) -> set[str]:
    """Return the SHA-256 of every file that PyPI has of a version."""
    url = f"{INDEX}/{canonical(name)}/"
    request = urllib.request.Request(url, headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=_INDEX_SECONDS) as answer:
        page = _Links()
        page.feed(answer.read().decode())
    hashes = {sha256 for file, sha256 in page.files if version_of(file) == version}
    if not hashes:
        raise SystemExit(f"{url} lists no file of {name} {version}; is the version on PyPI?")
    return hashes


def version_of(file: str) -> str | None:
    """Return the version in a file's name; None for files that pip does not install."""
    try:
        if file.endswith(".whl"):
            return str(parse_wheel_filename(file)[1])
        return str(parse_sdist_filename(file)[1])
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None


class _Links(HTMLParser):
    """The files of one package, without those that were yanked."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the name and hash of a link."""
        fields = dict(attrs)
        found = re.fullmatch(r".*/([^/#]+)#sha256=([0-9a-f]{64})", fields.get("href") or "")
        if tag == "a" and found is not None and "data-yanked" not in fields:
            self.files.append((urllib.request.unquote(found[1]), found[2]))


if __name__ == "__main__":
    main()
