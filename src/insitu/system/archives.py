"""Archives and pickles, known by their first bytes: insitu unpacks none and loads none.

An archive can hold names that leave its directory, links, and far more bytes than it has itself. A pickle is
a program. Both are rejected by name, so that nobody has to guess what a parser made of them.
"""

from __future__ import annotations

from pathlib import Path

from insitu.errors import InvalidRequest

_FIRST_BYTES = {
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "a zip archive",
    b"\x1f\x8b": "a gzip file",
    b"\xfd7zXZ\x00": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a rar archive",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
}
_LATER_BYTES = {
    (4, b"1AY&SY"): "a bzip2 file",
    (257, b"ustar\x00"): "a tar archive",
    (257, b"ustar  \x00"): "a tar archive",
}
_SAFETENSORS_AT = 8
"""Safetensors start with the length of their header, whose bytes may be any, and then `{`."""
HEAD_BYTES = 512
"""The bytes from the start of a file that tell."""


def packed_kind(head: bytes) -> str | None:
    """Return what kind of archive or pickle a file with these first bytes is; None if it is neither."""
    if head[_SAFETENSORS_AT : _SAFETENSORS_AT + 1] == b"{":
        return None
    known = {(0, first): kind for first, kind in _FIRST_BYTES.items()} | _LATER_BYTES
    return next((kind for (place, there), kind in known.items() if head.startswith(there, place)), None)


def reject_packed(path: Path) -> None:
    """Reject a file that is an archive or a pickle, whatever its name."""
    with path.open("rb") as opened:
        kind = packed_kind(opened.read(HEAD_BYTES))
    if kind is not None:
        raise InvalidRequest(
            f"{path} is {kind}: archives are never unpacked here, and pickles never loaded",
            hint="unpack it yourself, look at what it holds, and name the file or directory that is meant",
        )


def reject_foreign_links(directory: Path, *paths: Path) -> None:
    """Reject links among these files of a directory that lead out of it."""
    home = directory.resolve()
    for path in paths:
        if not path.resolve().is_relative_to(home):
            raise InvalidRequest(
                f"{path} is a link that leads out of its directory, to {path.resolve()}; it is not followed",
                hint=f"copy the files themselves and name the copy: cp -rL {directory} COPY",
            )
