"""Delete a run with everything of it."""

from __future__ import annotations

from insitu.client import InsituClient
from insitu.errors import NotFound
from insitu.types import ENDED_RUN_STATES
from insitu.wire.answers import DeletedRun, RunInfo


async def delete_run(client: InsituClient, run: RunInfo) -> DeletedRun:
    """Close a run and delete it; raise Conflict, with the reason, if something still uses it."""
    if run.state not in ENDED_RUN_STATES:
        await client.close_run(run.name)
    try:
        return await client.delete_run(run.name)
    except NotFound:  # by a first request whose answer was lost
        return DeletedRun(run.name, run.step, 0)
