"""The route for adapters that runs start from."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from starlette.concurrency import run_in_threadpool

from insitu.backend.adapters.disk_share import DiskShare
from insitu.backend.adapters.reader import AdapterReader
from insitu.backend.api.requests import new_router
from insitu.backend.api.security import Sender, holder_of
from insitu.backend.api.settings import Services
from insitu.backend.api.turns import upload_turn
from insitu.backend.ledger import adapter_files
from insitu.errors import InvalidRequest, TooLarge
from insitu.json_values import JsonObject
from insitu.wire.answers import AdapterReceipt
from insitu.wire.starts.adapter_upload import ADAPTER_TYPE
from insitu.wire.values import UPLOADED

Digest = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]
_UPLOAD_DOCS: JsonObject = {
    "requestBody": {
        "required": True,
        "description": 'A line {"config": <adapter_config.json>}, then the bytes of '
        "adapter_model.safetensors. The path has the SHA-256 of all of it.",
        "content": {ADAPTER_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


def adapter_routes(services: Services) -> APIRouter:
    """Build the router."""
    router = new_router("adapters")
    state_dir = services.settings.state_dir
    disk = DiskShare(state_dir)

    @router.put("/adapters/{sha256}", openapi_extra=_UPLOAD_DOCS, status_code=201)
    async def put_adapter(
        sha256: Digest, request: Request, response: Response, sender: Sender
    ) -> AdapterReceipt:
        """Upload an adapter for `init_from`. 201: stored and durable. 200: it was there already.

        It is kept for a day, or until the runs that start from it are ready.
        """
        num_bytes = _announced(request, services.limits.max_adapter_bytes)
        await run_in_threadpool(_remove_unused, services)
        name = sender.stored(sha256)
        created = not await run_in_threadpool(adapter_files.renew, state_dir, name)
        if created:
            async with upload_turn(services, await holder_of(request)), disk.reserved(sender, num_bytes):
                await AdapterReader(state_dir, sha256, services.limits, name).store(request.stream())
        else:
            response.status_code = 200
        lora = await run_in_threadpool(adapter_files.uploaded_settings, state_dir, name)
        assert lora is not None, "it was stored, and is kept for a day"
        return AdapterReceipt(UPLOADED + sha256, lora, created)

    return router


def _announced(request: Request, most: int) -> int:
    """Return the announced size; reject an upload that is too large before it is read."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != ADAPTER_TYPE:
        raise InvalidRequest(f"an adapter is sent as {ADAPTER_TYPE}, not {kind or 'without a Content-Type'}")
    length = request.headers.get("content-length", "")
    if not length.isdecimal():
        raise InvalidRequest("the size of the adapter is not announced", hint="send Content-Length")
    if int(length) > most:
        raise TooLarge(f"the adapter has {int(length)} bytes; at most {most} are taken")
    return int(length)


def _remove_unused(services: Services) -> None:
    adapter_files.remove_unused(services.settings.state_dir, services.ledger.awaited_sources())
