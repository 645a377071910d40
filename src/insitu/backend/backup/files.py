"""Files on their way into a backup and out of it: private, durable, hashed as they are copied."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from insitu.errors import InvalidRequest
from insitu.system.durable import make_directories, sync_path
from insitu.wire.message import Message

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileEntry(Message):
    """One file as a manifest lists it."""

    size: int
    sha256: str


def copy_file(source: Path, target: Path) -> FileEntry:
    """Copy a file to a new one that only its owner can read; return the size and hash of what was copied.

    Directories above the target are made, with mode 700. Neither side may be a symbolic link.
    """
    make_directories(target.parent)
    with (
        os.fdopen(os.open(source, os.O_RDONLY | os.O_NOFOLLOW), "rb") as opened,
        os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out,
    ):
        entry = _hash(opened, out)
        out.flush()
        os.fsync(out.fileno())
    return entry


def hash_file(path: Path) -> FileEntry:
    """Return the size and hash of a file."""
    with path.open("rb") as opened:
        return _hash(opened, None)


def regular_files(directory: Path) -> list[str]:
    """List the files below a directory by relative name; reject links and special files."""
    names: list[str] = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise InvalidRequest(
                f"{directory}: {name} is neither a file nor a directory; links are not followed",
                hint="put the file itself in its place",
            )
        if path.is_file():
            names.append(name)
    return names


def sync_directories(root: Path) -> None:
    """Make the names of all files below `root` durable."""
    for directory in (path for path in root.rglob("*") if path.is_dir()):
        sync_path(directory)
    sync_path(root)


def _hash(opened: BinaryIO, out: BinaryIO | None) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    for chunk in _chunks(opened):
        digest.update(chunk)
        size += len(chunk)
        if out is not None:
            out.write(chunk)
    return FileEntry(size, digest.hexdigest())


def _chunks(opened: BinaryIO) -> Iterator[bytes]:
    while chunk := opened.read(_CHUNK_BYTES):
        yield chunk
