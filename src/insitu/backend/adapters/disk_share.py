"""The disk that uploaded adapters take: a project may hold at most twice what its next upload leaves free."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from insitu.access.projects import Project
from insitu.backend.ledger import adapter_files
from insitu.backend.state_disk import LEAST_FREE_BYTES
from insitu.errors import Overloaded, Unavailable

_MIB = 1 << 20


class DiskShare:
    """Reserves room for uploads as they begin. Stored ones count for their project until they are removed."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._under_way: Counter[str | None] = Counter()

    @asynccontextmanager
    async def reserved(self, project: Project, num_bytes: int) -> AsyncGenerator[None]:
        """Reserve room for an upload for the length of a block, or raise Unavailable or Overloaded."""
        stored = await run_in_threadpool(adapter_files.stored_bytes, self._state_dir)
        disk_free = shutil.disk_usage(self._state_dir).free
        left = disk_free - LEAST_FREE_BYTES - self._under_way.total() - num_bytes
        if left < 0:
            raise Unavailable(
                f"the disk of the backend has {disk_free // _MIB} MiB free, too little for this adapter",
                hint="free some space, for example with DELETE /v1/runs/{run}/checkpoints/{step}",
            )
        held = stored[project.name] + self._under_way[project.name]
        if project.name is not None and held and held + num_bytes > 2 * left:
            raise Overloaded(
                f"adapters that this project has uploaded take {held // _MIB} MiB of the backend's disk, its "
                f"share while {disk_free // _MIB} MiB are free",
                hint="start the runs that they are for; an upload that no run starts from goes after a day",
            )
        self._under_way[project.name] += num_bytes
        try:
            yield
        finally:
            self._under_way[project.name] -= num_bytes
