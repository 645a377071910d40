"""Read a lock: packages with their versions, hashes and who needs them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_PIN = re.compile(r"(?P<name>[a-z0-9-]+)==(?P<version>[^\s\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class LockedPackage:
    """One package of a lock."""

    name: str
    version: str
    sha256: list[str]
    needed_by: list[str]


def read_lock(path: Path) -> list[LockedPackage]:
    """Return the packages; raise ValueError for a line that is not one of ours."""
    packages: list[LockedPackage] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.strip().removesuffix("\\").strip()
        if pin := _PIN.fullmatch(text):
            packages.append(LockedPackage(pin["name"], pin["version"], [], []))
        elif (found := _HASH.fullmatch(text)) and packages:
            packages[-1].sha256.append(found[1])
        elif text.startswith("# via ") and packages:
            packages[-1].needed_by.extend(text.removeprefix("# via ").split(", "))
        elif text and not text.startswith("#"):
            raise ValueError(f"{path}, line {number}: {text!r} is neither a pin nor a hash")
    return packages
