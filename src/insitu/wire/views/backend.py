"""Answers of the API that only its web pages need."""

from __future__ import annotations

from dataclasses import dataclass

from insitu.wire.message import Answer


@dataclass(frozen=True, slots=True)
class SessionView(Answer):
    """The key behind a session: its name, never the key itself."""

    key: str
    scopes: list[str]
    project: str | None
    """None: the key reaches everything."""
