"""The state directory's disk and permissions."""

from __future__ import annotations

import shutil
from pathlib import Path

from insitu.access.audit_log import AUDIT_FILE
from insitu.access.key_file import KEYS_FILE
from insitu.errors import Conflict

_MIB = 1 << 20
LEAST_FREE_BYTES = 256 * _MIB
"""Below this no step is begun: it would write a checkpoint, and merged weights, and fail in the middle."""
ENOUGH_FREE_BYTES = 512 * _MIB
"""Once short, the disk must have this much again, so that training does not stop and go at the limit."""

LOCK = "lock"
RESTORING = "restore.incomplete"
"""The file that is there while `insitu restore` is not done."""


class StateDisk:
    """Tells whether there is room for a training step."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shortage: str | None = None

    def shortage(self) -> str | None:
        """Return what is missing, with the figures of when it began; None if there is room."""
        free = shutil.disk_usage(self._directory).free
        if free >= (LEAST_FREE_BYTES if self._shortage is None else ENOUGH_FREE_BYTES):
            self._shortage = None
        elif self._shortage is None:
            self._shortage = (
                f"the disk of {self._directory} has {free // _MIB} MiB free, a step needs "
                f"{ENOUGH_FREE_BYTES // _MIB} MiB; free some space, for example with DELETE "
                "/v1/runs/{run}/checkpoints/{step}"
            )
        return self._shortage


def make_private(directory: Path) -> None:
    """Let this user alone into an existing directory, at its databases, its keys and its audit log."""
    directory.chmod(0o700)
    for path in (*directory.glob("*.db*"), *directory.glob(KEYS_FILE), *directory.glob(AUDIT_FILE)):
        path.chmod(0o600)


def check_whole(directory: Path) -> None:
    """Reject a directory that `insitu restore` began and did not finish."""
    if (directory / RESTORING).exists():
        raise Conflict(
            f"the state directory {directory} is not whole: `insitu restore` did not finish there",
            hint="delete what it holds and restore again",
        )
