"""The audit log of a state directory: who changed what, and when; one JSON line for each change.

    {"at":"2026-01-31T12:00:00.000Z","key":"nightly","change":"POST /v1/runs","from":"10.0.0.7"}

A line is written before its change is begun, so no change is without one; one that then fails has a line too.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import orjson

from insitu.errors import Unavailable

HERE = "this machine"
"""The sender of a change that no request made."""
AUDIT_FILE = "audit.jsonl"
_MAX_CHARS = 512


class AuditLog:
    """Appends to the file, which is opened for each line: it may be moved away at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, key: str, change: str, sender: str, project: str | None = None) -> None:
        """Append a line; several processes may do so at once. Raise Unavailable if it cannot be written.

        `project` is that of the key.
        """
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields = {"at": at, "key": key, "change": change[:_MAX_CHARS], "from": sender}
        if project is not None:
            fields["project"] = project
        line = orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                written = os.write(file, line)
            finally:
                os.close(file)
        except OSError as error:
            raise self._unavailable(error.strerror or str(error)) from error
        if written < len(line):
            raise self._unavailable("the disk is full")

    def _unavailable(self, why: str) -> Unavailable:
        return Unavailable(
            f"the change is not made, because it cannot be noted in {self._path.name}: {why}",
            hint=f"make space for {self._path} and let its owner write there, then repeat the request",
        )
