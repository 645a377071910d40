"""A message as an HTTP response."""

from __future__ import annotations

from starlette.responses import Response

from insitu.wire.message import Message, encode


class MessageResponse(Response):
    """A response whose body is one message of `insitu.wire`."""

    media_type = "application/json"

    def render(self, content: Message) -> bytes:
        """Return the message as JSON."""
        return encode(content)
