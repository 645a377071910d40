"""The door: which requests are answered, and the headers of every answer.

The server has no key, so a web page elsewhere must not reach it. A page cannot set the Host header: after its
own name is pointed at 127.0.0.1 (DNS rebinding), the browser still sends that name, and it is rejected here.

Two POSTs act: one runs code, the user's reward; one has a backend sample. They need the Origin that browsers
send with every POST, and a secret of this process that only a page of this origin can read.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from insitu.errors import Forbidden, InsituError, InvalidRequest
from insitu.view.http.responses import ErrorResponse
from insitu.web_pages import guarded

_METHODS = frozenset({"GET", "HEAD"})
_OWN_PAGES = re.compile(r"/view/v1/runs/[^/]+/groups/[^/]+/[^/]+/(rescore|resample)")
OWN_HEADER = "x-insitu-own-page"
_MAX_HEAD_BYTES = 16_384


def own_hosts(port: int) -> frozenset[str]:
    """Return the Host headers under which a browser on this machine reaches the server."""
    return frozenset(f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]"))


class Door:
    """ASGI middleware around everything."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str], token: str) -> None:
        self._app = app
        self._hosts = frozenset(hosts)
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or reject; add the headers either way."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise InvalidRequest(f"this server does not speak {scope['type']}")
        send = guarded(send)
        try:
            self._check(scope)
        except InsituError as error:
            await ErrorResponse(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > _MAX_HEAD_BYTES:
            raise InvalidRequest(f"address and headers are {size:,} bytes, more than {_MAX_HEAD_BYTES:,}")
        if headers.get("host", "").lower() not in self._hosts:
            raise Forbidden(
                "the Host header names another server",
                hint=f"open http://{min(self._hosts)}/ on this machine",
            )
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and scope["path"].startswith(
            "/view/"
        ):
            raise Forbidden("a page of another site asked for this")
        if scope["method"] == "POST" and _OWN_PAGES.fullmatch(scope["path"]):
            self._check_own_page(headers)
        elif scope["method"] not in _METHODS:
            raise _NotAllowed(f"{scope['method']} is not allowed: nothing here can be changed")

    def _check_own_page(self, headers: Headers) -> None:
        if headers.get("origin", "").lower() != f"http://{headers['host'].lower()}":
            raise Forbidden("a page of another origin asked for this", hint="use the page of this server")
        if not secrets.compare_digest(headers.get(OWN_HEADER, "").encode(), self._token.encode()):
            raise Forbidden(
                f"the header {OWN_HEADER} does not hold the secret of this process",
                hint="reload the page: the command that serves it was started again",
            )


class _NotAllowed(InsituError):
    """The method would change something."""

    status = 405
