"""Messages and errors as HTTP responses."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from insitu.errors import InsituError, InvalidRequest, NotFound, Overloaded, Unavailable
from insitu.wire.answers import error_body
from insitu.wire.message import Message, describe, encode

_log = logging.getLogger(__name__)


class MessageResponse(Response):
    """A response whose body is one message of `insitu.wire`; browsers must not keep it."""

    media_type = "application/json"

    def __init__(self, content: Message, status_code: int = 200) -> None:
        super().__init__(content, status_code, {"cache-control": "no-store"})

    def render(self, content: Message) -> bytes:
        """Return the message as JSON."""
        try:
            return encode(content)
        except TypeError:  # lone surrogates and integers beyond 64 bits are JSON too
            return json.dumps(asdict(content), allow_nan=False).encode()  # pyright: ignore[reportArgumentType] - a dataclass


class ErrorResponse(MessageResponse):
    """`{"error": {"type", "message", "hint"}}`."""

    def __init__(self, error: InsituError) -> None:
        super().__init__(error_body(error), error.status)
        if isinstance(error, Overloaded | Unavailable):
            self.headers["retry-after"] = "1"


def install(app: FastAPI) -> None:
    """Register the exception handlers."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, InsituError)
        if error.status >= 500:
            _log.error("%s %s: %s", request.method, request.url.path, error.message)
        return ErrorResponse(error)

    async def invalid(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return ErrorResponse(
            InvalidRequest(describe(error.errors()), hint="docs/view.md lists the parameters")
        )

    async def unrouted(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return ErrorResponse(NotFound(f"{request.url.path}: {error.detail}", hint="GET /view/v1/runs"))

    async def unexpected(request: Request, error: Exception) -> Response:
        # Starlette re-raises it after this response, and the server logs the traceback.
        return ErrorResponse(
            InsituError(f"{request.url.path} failed inside the server: {type(error).__name__}")
        )

    app.add_exception_handler(InsituError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, unrouted)
    app.add_exception_handler(Exception, unexpected)
