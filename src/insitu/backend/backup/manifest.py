"""The manifest of a backup, written last: a directory without one is not a backup."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import orjson

from insitu.backend.backup.files import FileEntry, hash_file, regular_files
from insitu.errors import InvalidRequest, NotFound
from insitu.system.archives import reject_packed
from insitu.system.durable import write_atomic
from insitu.wire.message import Malformed, Message, read

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Missing(Message):
    """A part that the ledger names and that could not be copied."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class BackupManifest(Message):
    """The content of a backup, by name relative to its directory."""

    format: Literal[1]
    insitu: str
    """The version that made it."""
    created_at: float
    files: dict[str, FileEntry]
    missing: list[Missing]

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(entry.size for entry in self.files.values())


def write_manifest(
    backup: Path, created_at: float, files: dict[str, FileEntry], missing: list[Missing]
) -> BackupManifest:
    """Complete a backup whose files are durable."""
    manifest = BackupManifest(1, version("insitu"), created_at, files, missing)
    content = orjson.dumps(manifest, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
    write_atomic(backup / MANIFEST, content, mode=0o600)
    return manifest


def verified_manifest(backup: Path) -> BackupManifest:
    """Return the manifest after every file was compared with it; the error names the first that differs."""
    manifest = _read(backup)
    found = {name for name in regular_files(backup) if name != MANIFEST}
    for name, entry in sorted(manifest.files.items()):
        if name not in found:
            raise differs(backup, name, "is missing")
        if hash_file(backup / name) != entry:
            raise differs(backup, name, "has other content than was backed up (size or SHA-256 differs)")
    if extra := sorted(found - manifest.files.keys()):
        raise differs(backup, extra[0], "is not in the manifest")
    return manifest


def differs(backup: Path, name: str, what: str) -> InvalidRequest:
    """Return the error of a file that is not what the manifest says."""
    return InvalidRequest(f"backup {backup}: {name} {what}", hint="restore another backup")


def _read(backup: Path) -> BackupManifest:
    path = backup / MANIFEST
    if backup.is_file():
        reject_packed(backup)
    try:
        return read(BackupManifest, path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(
            f"{backup} has no {MANIFEST}: it is not a backup, or `insitu backup` was interrupted",
            hint="restore another backup",
        ) from error
    except (OSError, Malformed) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise differs(backup, MANIFEST, f"cannot be read: {why}") from error
