"""The route by which an adapter leaves the backend: the files of a kept checkpoint, and their manifest."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import BinaryIO

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from insitu.backend.api.requests import new_router
from insitu.backend.api.routes_runs import RunName, StepNumber
from insitu.backend.api.settings import Services
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.errors import NotFound
from insitu.wire.starts.adapter_files import CheckpointFile, in_checkpoint

_TYPE = "application/octet-stream"
_CHUNK_BYTES = 1 << 20


def download_routes(services: Services) -> APIRouter:
    """Build the router."""
    router = new_router("adapters")

    @router.get(
        "/runs/{name}/checkpoints/{step}/files/{file}",
        response_class=StreamingResponse,
        responses={200: {"content": {_TYPE: {}}}},
    )
    def download(name: RunName, step: StepNumber, file: CheckpointFile) -> StreamingResponse:
        """A file of a kept checkpoint. The manifest has the SHA-256 of the others."""
        opened = _open(services, name, step, file)
        size = os.fstat(opened.fileno()).st_size
        return StreamingResponse(_chunks(opened), media_type=_TYPE, headers={"Content-Length": str(size)})

    return router


def _open(services: Services, run: str, step: int, file: CheckpointFile) -> BinaryIO:
    """Open the file; once it is open, its checkpoint may be deleted."""
    kept = [checkpoint.step for checkpoint in services.ledger.checkpoints(run)]
    run_dir = checkpoints.run_directory(services.settings.runs_dir, run)
    try:
        if step in kept:
            return (checkpoints.checkpoint_path(run_dir, step) / in_checkpoint(file)).open("rb")
    except FileNotFoundError:  # deleted since, or damaged
        pass
    raise NotFound(
        f"run {run!r} has no {file} of step {step}; kept are {', '.join(map(str, kept)) or 'none'}",
        hint=f"name a kept step, and pin the ones to keep: PUT /v1/runs/{run}/checkpoints/STEP/pin",
    )


async def _chunks(opened: BinaryIO) -> AsyncIterator[bytes]:
    with opened:
        while chunk := await run_in_threadpool(opened.read, _CHUNK_BYTES):
            yield chunk
