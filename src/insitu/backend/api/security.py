"""The door: Host, Origin and key are checked before any route is looked up.

Checking here rather than per route means that no route can be forgotten, and that without a key nobody
learns which routes, runs or documents exist.
"""

from __future__ import annotations

import base64

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from insitu.backend.api.responses import MessageResponse
from insitu.backend.api.settings import ApiSettings
from insitu.errors import Forbidden, InsituError, InvalidRequest, Unauthorized
from insitu.wire.answers import error_body

_SAFE_METHODS = frozenset({"GET", "HEAD"})
OPEN_PATHS = frozenset({"/health", "/ready"})
"""The paths that need no key."""
KNOWN = "insitu.known"
"""The entry of a request's scope that the door calls once the key is found to be right."""


class Door:
    """ASGI middleware that lets only authorised requests in."""

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or respond with an error."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise InvalidRequest(f"this server does not speak {scope['type']}")
        try:
            self._check(scope)
        except InsituError as error:
            headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else None
            await MessageResponse(error_body(error), error.status, headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._check_host(headers)
        # Compared as the router will match it: no other spelling gets through.
        if scope["method"] == "GET" and scope["path"] in OPEN_PATHS:
            return
        self._check_origin(scope["method"], headers)
        self._check_key(headers)
        if KNOWN in scope:
            scope[KNOWN]()
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest("compressed bodies are not accepted", hint="omit Content-Encoding")

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            raise InvalidRequest(f"expected one Host header, got {len(hosts)}")
        name = _without_port(hosts[0])
        if not self._settings.accepts_host(name):
            raise InvalidRequest(
                f"this server is not called {name!r}",
                hint="start it with --allowed-host NAME to accept that name",
            )

    def _check_origin(self, method: str, headers: Headers) -> None:
        origin = headers.get("origin")
        if method in _SAFE_METHODS or origin is None:
            return
        if origin.partition("://")[2] != headers["host"]:
            raise Forbidden(
                f"requests from web pages of {origin!r} are rejected", hint="call the API from a program"
            )

    def _check_key(self, headers: Headers) -> None:
        if not self._settings.accepts_key(key_of(headers)):
            raise Unauthorized(
                "the key is missing or wrong",
                hint="send the header `Authorization: Bearer $INSITU_API_KEY`",
            )


def key_of(headers: Headers) -> str:
    """Return the request's key: a bearer token, or the password of an address (http://any:KEY@host)."""
    sent = headers.getlist("authorization")
    scheme, _, value = (sent[0] if len(sent) == 1 else "").partition(" ")
    if scheme.lower() == "basic":
        try:
            value = base64.b64decode(value, validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return value.strip() if scheme.lower() in ("bearer", "basic") else ""


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
