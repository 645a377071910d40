"""Files below a directory, and their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_CHUNK_BYTES = 1 << 20


def files_below(directory: Path, wrong: Callable[[str], Exception]) -> list[str]:
    """List the files below a directory by relative name; raise `wrong(name)` for a link or special file."""
    names: list[str] = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise wrong(name)
        if path.is_file():
            names.append(name)
    return names


def hashed(opened: BinaryIO, copy: BinaryIO | None = None) -> tuple[str, int]:
    """Read a file to its end; return its SHA-256 and size. What is read is written to `copy`, if given."""
    digest, size = hashlib.sha256(), 0
    while chunk := opened.read(_CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
        if copy is not None:
            copy.write(chunk)
    return digest.hexdigest(), size
