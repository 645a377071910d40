"""The few places for uploads that are read at the same time, with a share for each project and key."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from insitu.access.keyring import Holder
from insitu.backend.api.requests import BoundedRequest
from insitu.backend.api.security import holder_of
from insitu.backend.api.settings import Services


@asynccontextmanager
async def upload_turn(services: Services, holder: Holder) -> AsyncGenerator[None]:
    """Wait for one of the few places for uploads, but not for long."""
    async with services.uploads.turn(holder, services.limits.upload_wait_seconds):
        yield


def uploading_route(services: Services) -> type[APIRoute]:
    """Return a route class for JSON bodies of the size of a group: read and parsed in a turn of an upload."""
    limits = services.limits

    class UploadingRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def handle(request: Request) -> Response:
                bounded = BoundedRequest(request.scope, request.receive)
                async with upload_turn(services, await holder_of(request)):
                    await bounded.read(limits.max_group_bytes, limits.max_training_values, limits)
                    return await handler(bounded)

            return handle

    return UploadingRoute
