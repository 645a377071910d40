"""Log a browser in and out: a key is exchanged for a cookie that stands for it."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request, Response
from fastapi.routing import APIRouter

from insitu.access.audit_log import AuditLog
from insitu.access.keyring import Holder, Keyring
from insitu.access.sessions import LIFETIME_SECONDS, Sessions
from insitu.backend.api.requests import bounded_route, new_router
from insitu.backend.api.security import address_of, cookie_name, holder_of, session_in
from insitu.backend.api.settings import Services
from insitu.errors import Unauthorized
from insitu.wire.bodies import LoginBody
from insitu.wire.views.backend import SessionView

_MAX_BYTES = 8 * 2**10
_KEY_HINT = "it is the backend's INSITU_API_KEY, or a key that was created for you"
_WRONG = "unknown"
"""Stands for the key's name in the audit log."""


def login_routes(services: Services, sessions: Sessions) -> APIRouter:
    """Build the router. Its functions run in the event loop, as `Sessions` requires."""
    settings = services.settings
    keys = Keyring(settings.key_sha256, settings.keys_file)
    audit = AuditLog(settings.audit_file)
    router = new_router("pages", prefix="", route_class=bounded_route(_MAX_BYTES, services.limits))

    @router.post("/login")
    async def login(body: LoginBody, request: Request, response: Response) -> SessionView:
        """Begin a session with the rights of the key; the answer sets its cookie."""
        sessions.check_attempts()
        sender = address_of(request.scope)
        try:
            holder = keys.holder([body.key])
            if holder is None:
                raise Unauthorized("the key is missing or wrong", hint=_KEY_HINT)
        except Unauthorized:
            sessions.note_wrong()
            audit.note(_WRONG, "POST /login, rejected", sender)
            raise
        audit.note(holder.key, "POST /login", sender, holder.project.name)
        response.set_cookie(
            cookie_name(settings),
            sessions.begin(body.key),
            max_age=LIFETIME_SECONDS,
            path="/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        response.headers["cache-control"] = "no-store"
        return _view(holder)

    @router.post("/logout", status_code=204)
    async def logout(request: Request, response: Response) -> None:
        """End the session of the request's cookie. Its key stays valid."""
        sessions.end(session_in(settings, request.headers.get("cookie", "")))
        response.delete_cookie(cookie_name(settings), path="/", httponly=True, samesite="strict")

    @router.get("/session")
    async def session(holder: Annotated[Holder, Depends(holder_of)]) -> SessionView:
        """Return who the sender is, by key or by cookie."""
        return _view(holder)

    return router


def _view(holder: Holder) -> SessionView:
    return SessionView(holder.key, sorted(holder.scopes), holder.project.name)
