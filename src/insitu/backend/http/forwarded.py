"""The headers of a proxy in front of the API: a request's scheme, and the address that the proxy saw.

A client can send such headers too, and a proxy adds its own behind them: so the last one counts. They are
believed from the machine itself and, if the operator has said that a proxy is the only way in, from anybody.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from insitu.system.keys import is_address, is_loopback


class Forwarded:
    """ASGI middleware that puts them into the request's scope."""

    def __init__(self, app: ASGIApp, *, behind_proxy: bool) -> None:
        self._app = app
        self._behind_proxy = behind_proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope.get("client"):
            peer, port = scope["client"]
            headers = Headers(scope=scope)
            scheme = _last(headers, "x-forwarded-proto")
            if scheme in ("http", "https") and (self._behind_proxy or is_loopback(peer)):
                scope["scheme"] = scheme
            if self._behind_proxy and is_address(seen := _last(headers, "x-forwarded-for")):
                scope["client"] = seen, port
        await self._app(scope, receive, send)


def _last(headers: Headers, name: str) -> str:
    return ",".join(headers.getlist(name)).rpartition(",")[2].strip()
