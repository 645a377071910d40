"""Access control: keys, the loopback rule of the control routes, and browsers kept out."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import orjson
from aiohttp import web

from insitu.errors import InsituError, InvalidRequest, Unauthorized
from insitu.gateway.shared.settings import Settings
from insitu.system.keys import hash_key, is_loopback
from insitu.wire.answers import error_body

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN_PATHS = frozenset({"/health", "/ready"})
CONTROL_PREFIX = "/control/"
KEY_HEADER = "x-api-key"
"""The header in which clients of Anthropic's protocol send their key."""


class Guard:
    """Checks every request but to `OPEN_PATHS`. Keys are kept as digests and compared in constant time."""

    def __init__(self, settings: Settings) -> None:
        self._api = hash_key(settings.api_key)
        self._admin = hash_key(settings.admin_key) if settings.admin_key else None
        self._host = settings.host
        self._loopback_only = is_loopback(settings.host)
        self._allowed_hosts = settings.allowed_hosts

    def check(self, request: web.Request) -> None:
        """Raise unless the request may pass."""
        if request.path in OPEN_PATHS:
            return
        self._check_browser(request)
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = [key.strip() if scheme.lower() == "bearer" else ""]
        if request.path.startswith(CONTROL_PREFIX):
            wanted = self._admin if self._is_local(request.remote or "") else None
        else:
            wanted = self._api
            given.append(request.headers.get(KEY_HEADER, ""))
        if wanted is None or not any(hmac.compare_digest(hash_key(key), wanted) for key in given):
            hint = f"send `Authorization: Bearer <key>` or `{KEY_HEADER}: <key>`"
            raise Unauthorized("The key is missing or wrong.", hint=hint)

    def _is_local(self, remote: str) -> bool:
        """Return True for a caller on this machine, which may have called the gateway by its own address."""
        return is_loopback(remote) or remote == self._host

    def _check_browser(self, request: web.Request) -> None:
        """Reject web pages of other sites, whatever name they resolve to a local gateway."""
        try:
            host = urlsplit(f"//{request.host}").hostname or ""
        except ValueError:
            host = ""
        if self._loopback_only and not is_loopback(host) and host not in self._allowed_hosts:
            raise InvalidRequest(f"Host `{request.host}` is not this gateway.")
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.host:
            raise InvalidRequest("Requests from other origins are rejected.")


def error_response(error: InsituError, body: object = None) -> web.Response:
    """Return an error as JSON, with `Retry-After` where waiting helps."""
    headers = {"retry-after": "5"} if error.status in (429, 503) else None
    content = orjson.dumps(error_body(error) if body is None else body)
    return web.Response(body=content, status=error.status, headers=headers, content_type="application/json")
