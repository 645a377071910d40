"""JSON requests within bounds: a size cap before parsing, and a parser that refuses NaN and bad UTF-8."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from insitu.errors import TooLarge


class BoundedRequest(Request):
    """A request whose JSON body is parsed strictly."""

    async def json(self) -> Any:
        """The body as JSON. Unlike the standard library's, this parser knows no NaN."""
        return orjson.loads(await self.body())


async def read_bounded(request: Request, max_bytes: int) -> None:
    """Read the body into the request, or TooLarge as soon as it is over the cap."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise TooLarge(f"the body is over {max_bytes} bytes", hint="send fewer or smaller items")
    # Where Starlette itself keeps a body that has been read.
    request._body = bytes(body)


def bounded_route(max_bytes: int) -> type[APIRoute]:
    """A route class whose JSON bodies are at most `max_bytes` long."""

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def handle(request: Request) -> Response:
                bounded = BoundedRequest(request.scope, request.receive)
                if self.body_field is not None:
                    await read_bounded(bounded, max_bytes)
                return await handler(bounded)

            return handle

    return BoundedRoute
