"""Files on their way into a backup and out of it: private, durable, hashed as they are copied."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from insitu.errors import InvalidRequest
from insitu.system.durable import make_directories, sync_path
from insitu.system.files import files_below, hashed
from insitu.wire.message import Message


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
        sha256, size = hashed(opened, out)
        out.flush()
        os.fsync(out.fileno())
    return FileEntry(size, sha256)


def hash_file(path: Path) -> FileEntry:
    """Return the size and hash of a file."""
    with path.open("rb") as opened:
        sha256, size = hashed(opened)
    return FileEntry(size, sha256)


def regular_files(directory: Path) -> list[str]:
    """List the files below a directory by relative name; reject links and special files."""
    return files_below(
        directory,
        lambda name: InvalidRequest(
            f"{directory}: {name} is neither a file nor a directory; links are not followed",
            hint="put the file itself in its place",
        ),
    )


def sync_directories(root: Path) -> None:
    """Make the names of all files below `root` durable."""
    for directory in (path for path in root.rglob("*") if path.is_dir()):
        sync_path(directory)
    sync_path(root)
