"""The labels of a call, by path or header: its rollout and the part of the agent that makes it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from aiohttp import web

from insitu.access.projects import EVERYTHING, Project
from insitu.errors import InvalidRequest
from insitu.types import FUNCTION_PATTERN
from insitu.wire.headers import FUNCTION_HEADER, ROLLOUT_HEADER
from insitu.wire.values import NAME_PATTERN, SEPARATOR

PROJECT = web.RequestKey("project", Project)
"""The project of a request's key, set where the key is recognised."""
_ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}")
_STORED_ID = re.compile(rf"({NAME_PATTERN.pattern[1:-1]}{SEPARATOR})?{_ROLLOUT_ID.pattern}")
"""Keys without a project name the rollouts of projects too, as they are stored."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The origin of a call; both None outside any rollout."""

    rollout_id: str | None
    """As it is stored: within the project."""
    function: str | None


def sender_of(request: web.Request) -> Project:
    """Return the project of the request's key."""
    return request[PROJECT]


def _pattern_of(request: web.Request) -> re.Pattern[str]:
    return _STORED_ID if sender_of(request) == EVERYTHING else _ROLLOUT_ID


def named_rollout(request: web.Request) -> str | None:
    """Return the rollout that a request names, even an invalid one; the path overrides the header."""
    project, pattern = sender_of(request), _pattern_of(request)
    named = request.match_info.get("rollout_id") or request.headers.get(ROLLOUT_HEADER)
    return project.stored(named) if named is not None and pattern.fullmatch(named) else None


def labels_of(request: web.Request) -> Labels:
    """Return the labels of a request; InvalidRequest if path and header disagree or a name is not allowed."""
    named = _label(request, "rollout_id", ROLLOUT_HEADER, "Rollout id", _pattern_of(request))
    return Labels(
        rollout_id=None if named is None else sender_of(request).stored(named),
        function=_label(request, "function", FUNCTION_HEADER, "Function name", FUNCTION_PATTERN),
    )


def _label(request: web.Request, key: str, header: str, what: str, pattern: re.Pattern[str]) -> str | None:
    named, sent = request.match_info.get(key), request.headers.get(header)
    if named is not None and sent is not None and named != sent:
        raise InvalidRequest(
            f"{what}: the path names `{named[:80]}`, but the header {header} names `{sent[:80]}`."
        )
    value = named if named is not None else sent
    if value is not None and not pattern.fullmatch(value):
        raise InvalidRequest(
            f"{what} {value[:80]!r} is not allowed.", hint=f"it must match {pattern.pattern}"
        )
    return value
