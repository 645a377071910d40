"""Error responses: `{"error": {"type", "message", "hint"}}`, without echoing the caller's values."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from insitu.backend.api.responses import MessageResponse
from insitu.backend.api.security import tell
from insitu.database.engine import cause_of
from insitu.errors import InsituError, InvalidRequest, Overloaded, Unavailable
from insitu.wire.answers import error_body
from insitu.wire.message import describe

log = logging.getLogger(__name__)


def install(app: FastAPI) -> None:
    """Register the exception handlers."""

    async def known(request: Request, error: Exception) -> MessageResponse:
        assert isinstance(error, InsituError)
        if error.status >= 500:
            log.error("%s: %s", type(error).__name__, error.message)
        return _answer(tell(request, error))

    async def invalid(_request: Request, error: Exception) -> MessageResponse:
        assert isinstance(error, RequestValidationError)
        hint = "GET /v1/openapi.json describes every route"
        return _answer(InvalidRequest(describe(error.errors()), hint=hint))

    async def unrouted(request: Request, error: Exception) -> MessageResponse:
        assert isinstance(error, HTTPException)
        kind = {404: "NotFound", 405: "MethodNotAllowed"}.get(error.status_code, "InvalidRequest")
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = error_body(InsituError(message, hint="GET /v1/openapi.json lists the routes"), kind)
        return MessageResponse(body, error.status_code, headers=error.headers)

    async def storage(_request: Request, error: Exception) -> MessageResponse:
        assert isinstance(error, DBAPIError)
        log.error("the record store failed: %s", error.orig)
        hint = "free space on its disk or check its server, then repeat the request under the same id"
        return _answer(Unavailable(f"the record store cannot be used: {cause_of(error)}", hint=hint))

    async def unexpected(request: Request, error: Exception) -> MessageResponse:
        # Starlette re-raises it after this response, and the server logs the traceback.
        message = f"{request.method} {request.url.path} failed inside the server: {type(error).__name__}"
        return _answer(InsituError(message, hint="see logs/api.log in the state directory"))

    async def left(request: Request, _error: Exception) -> MessageResponse:
        # Nobody reads this response; the client retries under the same id.
        log.info("client left during %s %s", request.method, request.url.path)
        return _answer(InvalidRequest("the request ended before its body did"))

    app.add_exception_handler(ClientDisconnect, left)
    app.add_exception_handler(InsituError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, unrouted)
    app.add_exception_handler(DBAPIError, storage)
    app.add_exception_handler(Exception, unexpected)


def _answer(error: InsituError) -> MessageResponse:
    headers = {"Retry-After": "1"} if isinstance(error, Overloaded | Unavailable) else None
    return MessageResponse(error_body(error), error.status, headers=headers)
