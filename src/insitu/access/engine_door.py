"""The door of our own engines: vLLM answers those who have its key, the supervisor and the gateway.

vLLM listens on loopback, where every user of the machine can connect, and publication needs its development
endpoints, which change what is served. vLLM's own option `--middleware` puts this door in front of them all.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

VARIABLE = "INSITU_ENGINE_KEY"
"""Passes the key to engines and gateway: by environment, never by command line."""
_HEADER = "x-insitu-engine-key"
_HEADERS = [(b"content-type", b"application/json"), (b"connection", b"close")]
_BODY = b'{"error": {"message": "This engine belongs to an insitu backend. Ask its gateway.", "code": 401}}'

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def new_key() -> str:
    """Return a key for the engines of one start."""
    return secrets.token_hex(32)


def headers(key: str) -> dict[str, str]:
    """Return the headers that open an engine's door; none for an engine that has no door."""
    return {_HEADER: key} if key else {}


class EngineDoor:
    """Lets requests with the key pass, as ASGI middleware that vLLM loads by its name."""

    def __init__(self, app: App) -> None:
        self._app = app
        key = os.environ.get(VARIABLE, "")
        if not key:
            raise RuntimeError(f"{VARIABLE} is not set: nobody could ask this engine anything")
        self._key = key.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._opens(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": _BODY})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _opens(self, sent: Iterable[tuple[bytes, bytes]]) -> bool:
        name = _HEADER.encode()
        return any(each == name and hmac.compare_digest(value, self._key) for each, value in sent)


VLLM_ARGUMENTS = ("--middleware", f"{EngineDoor.__module__}.{EngineDoor.__qualname__}")
