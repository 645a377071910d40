"""Requests: routers, and JSON bodies with a size limit and a parser that rejects NaN and bad UTF-8."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi.routing import APIRoute, APIRouter
from starlette.requests import Request
from starlette.responses import Response

from insitu.backend.api.arriving import arriving
from insitu.backend.api.settings import Limits
from insitu.errors import TooLarge
from insitu.json_size import count_values
from insitu.wire.answers import ErrorBody

PREFIX = "/v1"


class BoundedRequest(Request):
    """A request whose JSON body is parsed strictly."""

    async def json(self) -> object:
        """Parse the body as JSON. Unlike the standard library's, this parser rejects NaN."""
        return orjson.loads(await self.body())

    async def read(self, max_bytes: int, max_values: int, limits: Limits) -> None:
        """Read the body; raise TooLarge as soon as it exceeds a limit, TooSlow if it trickles."""
        body = bytearray()
        async for chunk in arriving(self.stream(), limits):
            body += chunk
            if len(body) > max_bytes:
                raise TooLarge(f"the body is over {max_bytes} bytes", hint="send fewer or smaller items")
        count_values(body, max_values)
        # Starlette itself caches the body it has read here.
        self._body = bytes(body)


def new_router(tag: str, prefix: str = PREFIX, route_class: type[APIRoute] = APIRoute) -> APIRouter:
    """Return a router whose errors are documented."""
    return APIRouter(
        prefix=prefix, tags=[tag], route_class=route_class, responses={"default": {"model": ErrorBody}}
    )


def bounded_route(max_bytes: int, limits: Limits) -> type[APIRoute]:
    """Return a route class that limits JSON bodies to `max_bytes`, and their values."""

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def handle(request: Request) -> Response:
                bounded = BoundedRequest(request.scope, request.receive)
                if self.body_field is not None:
                    await bounded.read(max_bytes, limits.max_body_values, limits)
                return await handler(bounded)

            return handle

    return BoundedRoute
