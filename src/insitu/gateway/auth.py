"""Access control: keys and scopes, the loopback rule of the control routes, and browsers kept out."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import orjson
from aiohttp import web

from insitu.access.keyring import Holder, Keyring
from insitu.access.routes import GATEWAY, Access, Need, need_of
from insitu.access.strangers import NO_KEY
from insitu.errors import InsituError, InvalidRequest, LimitReached, Unauthorized
from insitu.gateway.shared.settings import Settings
from insitu.system.keys import hash_key, is_loopback
from insitu.wire.answers import error_body

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
KEY_HEADER = "x-api-key"
"""The header in which clients of Anthropic's protocol send their key."""
KEY_HINT = f"send `Authorization: Bearer <key>` or `{KEY_HEADER}: <key>`"
_RETRY_SECONDS = 5


class Guard:
    """Checks every request. Keys are kept as digests and compared in constant time."""

    def __init__(self, settings: Settings) -> None:
        self._keys = Keyring(hash_key(settings.api_key), settings.keys_file)
        self._admin = hash_key(settings.admin_key) if settings.admin_key else None
        self._host = settings.host
        self._loopback_only = is_loopback(settings.host)
        self._allowed_hosts = settings.allowed_hosts

    def identify(self, request: web.Request) -> Holder | None:
        """Return the sender; None where no key is needed. Raise Unauthorized for everybody else."""
        _, need = _route(request)
        if need is Access.OPEN:
            return None
        self._check_browser(request)
        bearer = _bearer(request.headers.get("authorization", ""))
        if need is Access.SUPERVISOR:
            holder = self._supervisor(request, bearer)
        else:
            holder = self._keys.holder([bearer, request.headers.get(KEY_HEADER, "")])
        if holder is None:
            raise Unauthorized(NO_KEY, hint=KEY_HINT)
        return holder

    def knows(self, authorization: str, key: str) -> bool:
        """Return True if one of a request's two headers has a valid key, or the supervisor's."""
        bearer = _bearer(authorization)
        return self._is_supervisor(bearer) or self._keys.holder([bearer, key]) is not None

    def authorise(self, request: web.Request, holder: Holder) -> None:
        """Raise Forbidden if the sender's key lacks the scope of the route."""
        route, need = _route(request)
        holder.require(need, route)

    def _supervisor(self, request: web.Request, key: str) -> Holder | None:
        """Return the supervisor, which calls from this machine with a key of its own; it has no scope."""
        is_supervisor = self._is_local(request.remote or "") and self._is_supervisor(key)
        return Holder("supervisor", frozenset()) if is_supervisor else None

    def _is_supervisor(self, key: str) -> bool:
        return self._admin is not None and hmac.compare_digest(hash_key(key), self._admin)

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


def _bearer(authorization: str) -> str:
    """Return the key of the header `Authorization`; empty if it has another scheme."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _route(request: web.Request) -> tuple[str, Need]:
    """Return the route that the router has chosen, and what it needs."""
    resource = request.match_info.route.resource
    if resource is None:
        return "", Access.ANY_KEY  # for the answer that there is no such path or method
    return f"{request.method} {resource.canonical}", need_of(GATEWAY, request.method, resource.canonical)


def error_response(error: InsituError, body: object = None) -> web.Response:
    """Return an error as JSON, with `Retry-After` where waiting helps."""
    seconds = error.retry_seconds if isinstance(error, LimitReached) else _RETRY_SECONDS
    headers = {"retry-after": str(seconds)} if error.status in (429, 503) else None
    content = orjson.dumps(error_body(error) if body is None else body)
    return web.Response(body=content, status=error.status, headers=headers, content_type="application/json")
