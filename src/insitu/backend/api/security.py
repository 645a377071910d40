"""The door: Host, Origin, key and scope are checked before any route is entered, and changes are noted.

A key comes in the header `Authorization`, or a browser's session stands for it; both have the same rights.
Checking here rather than per route means that no route can be forgotten, and that without a key nobody
learns which routes, runs or documents exist.
"""

from __future__ import annotations

import base64
from collections.abc import MutableMapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from insitu.access.audit_log import AuditLog
from insitu.access.keyring import Holder, Keyring
from insitu.access.meters import Admission, KeyMeters
from insitu.access.projects import Project
from insitu.access.routes import API, Access, Need, need_of
from insitu.access.sessions import Sessions
from insitu.access.strangers import Strangers
from insitu.backend.api.responses import MessageResponse
from insitu.backend.api.settings import ApiSettings
from insitu.errors import Forbidden, InsituError, InvalidRequest, LimitReached, Unauthorized
from insitu.web_pages import guarded
from insitu.wire.answers import error_body

_SAFE_METHODS = frozenset({"GET", "HEAD"})
KNOWN = "insitu.known"
"""The entry of a request's scope that the door calls once the key is found to be right."""
_HOLDER = "insitu.holder"
_PROJECT = "insitu.project"
_KEY_HINT = "send the header `Authorization: Bearer $INSITU_API_KEY`"


async def sender_of(request: Request) -> Project:
    """Return the project of the request's key. A route without a key has none, and must not ask."""
    return request.scope[_PROJECT]


async def holder_of(request: Request) -> Holder:
    """Return the holder of the request's key. A route without a key has none, and must not ask."""
    return request.scope[_HOLDER]


Sender = Annotated[Project, Depends(sender_of)]
"""The project whose names a request uses and whose things it may see."""


def tell(request: Request, error: InsituError) -> InsituError:
    """Return an error whose texts the request's sender may read."""
    sender = request.scope.get(_PROJECT)
    return sender.tell(error) if isinstance(sender, Project) else error


class Door:
    """ASGI middleware that lets only authorised requests in."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ApiSettings,
        routes: Sequence[BaseRoute],
        meters: KeyMeters,
        sessions: Sessions,
    ) -> None:
        """`routes` are those of the application's router."""
        self._app = app
        self._settings = settings
        self._routes = routes
        self._keys = Keyring(settings.key_sha256, settings.keys_file)
        self._meters = meters
        self._sessions = sessions
        self._audit = AuditLog(settings.audit_file)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or respond with an error."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise InvalidRequest(f"this server does not speak {scope['type']}")
        send = guarded(send)
        with ExitStack() as under_way:
            try:
                receive = self._let_in(scope, receive, under_way)
            except InsituError as error:
                headers = _headers(error) or {}
                if _PROJECT not in scope:  # a stranger's next request is judged like its first one
                    headers["Connection"] = "close"
                await MessageResponse(error_body(error), error.status, headers)(scope, receive, send)
                return
            await self._app(scope, receive, send if _PROJECT in scope else _closing(send))

    def _let_in(self, scope: Scope, receive: Receive, under_way: ExitStack) -> Receive:
        """Check a request and count it until `under_way` ends; return how to read its body."""
        self._check_head(scope)
        headers = Headers(scope=scope)
        self._check_host(headers)
        route, need = self._need(scope)
        if need is Access.OPEN:
            return receive
        self._check_origin(scope["method"], headers)
        if need is Access.LOGIN:
            return receive  # the route checks the key in the body, and notes the attempt
        holder = self._holder(scope["method"], headers)
        if KNOWN in scope:
            scope[KNOWN]()
        scope[_HOLDER], scope[_PROJECT] = holder, holder.project
        holder.require(need, route)
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest("compressed bodies are not accepted", hint="omit Content-Encoding")
        num_bytes = _body_bytes(headers)
        admission = under_way.enter_context(self._meters.admitted(holder, num_bytes))
        if route and scope["method"] not in _SAFE_METHODS:
            change = f"{scope['method']} {scope['path']}"
            self._audit.note(holder.key, change, address_of(scope), holder.project.name)
        return receive if num_bytes is not None else _counting(receive, admission)

    def _check_head(self, scope: Scope) -> None:
        """Reject a head that is too large: uvicorn bounds only one that arrives in several parts."""
        head: list[bytes] = [scope["raw_path"], scope["query_string"]]
        head += (part for pair in scope["headers"] for part in pair)
        size, most = sum(map(len, head)), self._settings.limits.max_head_bytes
        if size > most:
            raise InvalidRequest(f"address and headers are {size:,} bytes, more than {most:,}")

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

    def _need(self, scope: Scope) -> tuple[str, Need]:
        """Return the route that the router will choose, by the router's own rules, and what it needs."""
        for route in self._routes:
            if route.matches(scope)[0] is Match.FULL:
                path = getattr(route, "path", "")
                return f"{scope['method']} {path}", need_of(API, scope["method"], path)
        return "", Access.ANY_KEY  # for the answer that there is no such path or method

    def _holder(self, method: str, headers: Headers) -> Holder:
        if "authorization" in headers:
            holder = self._keys.holder([key_of(headers)])
        else:
            cookies = headers.get("cookie", "")
            holder = _session_holder(self._settings, self._keys, self._sessions, cookies)
            if holder is not None and method not in _SAFE_METHODS and "origin" not in headers:
                # A browser sends its cookie with requests that any page makes, and says which page it was.
                raise Forbidden(
                    "a change in a browser's session needs the header Origin", hint=f"or {_KEY_HINT}"
                )
        if holder is None:
            raise Unauthorized("the key is missing or wrong", hint=_KEY_HINT)
        return holder


def strangers(settings: ApiSettings, sessions: Sessions) -> Strangers:
    """Return how requests are judged before they are parsed."""
    keys = Keyring(settings.key_sha256, settings.keys_file)

    def is_key(sent: str, _: str) -> bool:
        return keys.holder([_key_in(sent)]) is not None

    def is_session(sent: str) -> bool:
        return _session_holder(settings, keys, sessions, sent) is not None

    return Strangers(API, is_key, _KEY_HINT, is_session=is_session)


def cookie_name(settings: ApiSettings) -> str:
    """Return the name of the session's cookie. Browsers share cookies between ports, so it has the port."""
    return f"insitu_session_{settings.port}"


def session_in(settings: ApiSettings, cookies: str) -> str:
    """Return the session's id from the header `Cookie`; empty if it has none."""
    return cookie_parser(cookies).get(cookie_name(settings), "")


def _session_holder(settings: ApiSettings, keys: Keyring, sessions: Sessions, cookies: str) -> Holder | None:
    """Return the holder of the key that a session stands for; None without a session."""
    key_hash = sessions.key_hash(session_in(settings, cookies))
    return None if key_hash is None else keys.holder_by_hash([key_hash])


def address_of(scope: Scope) -> str:
    """Return where a request came from, for the audit log."""
    return scope["client"][0] if scope.get("client") else "unknown"


def key_of(headers: Headers) -> str:
    """Return the request's key: a bearer token, or the password of an address (http://any:KEY@host)."""
    sent = headers.getlist("authorization")
    return _key_in(sent[0]) if len(sent) == 1 else ""


def _key_in(authorization: str) -> str:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            value = base64.b64decode(value, validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return value.strip() if scheme.lower() in ("bearer", "basic") else ""


def _headers(error: InsituError) -> dict[str, str] | None:
    if isinstance(error, LimitReached):
        return {"Retry-After": str(error.retry_seconds)}
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else None


def _body_bytes(headers: Headers) -> int | None:
    """Return the declared length of the body; None if there is a body of another length."""
    declared = headers.get("content-length", "")
    if declared.isdecimal():
        return int(declared)
    return None if "transfer-encoding" in headers else 0


def _counting(receive: Receive, admission: Admission) -> Receive:
    """Count the bytes of the body as they arrive."""

    async def counted() -> MutableMapping[str, Any]:
        message = await receive()
        admission.spend_bytes(len(message.get("body", b"")))
        return message

    return counted


def _closing(send: Send) -> Send:
    """Close the connection after the answer, as the door does: a stranger's next request is judged, too."""

    async def closing(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
        await send(message)

    return closing


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
