"""Maps an agent's exception to the rollout's ending, without importing the library that raised it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from insitu.types import Ending
from insitu.workflow.outcome import WorkflowFailed

MAX_REASON_CHARS = 500
MAX_OWN_REASON_CHARS = 4_000
"""For insitu's own failures, which may include the last output of a program."""

_CONNECTION_ERRORS = frozenset(
    {
        "APIConnectionError",  # openai, anthropic
        "APITimeoutError",
        "ClientConnectionError",  # aiohttp
        "TransportError",  # httpx
        "ConnectionError",  # requests, the standard library
    }
)
_OVERFLOW_ERRORS = frozenset({"ContextWindowExceededError"})  # litellm
_OVERFLOW_TEXT = re.compile(
    r"maximum\s+context\s+length|maximum\s+model\s+length|context_length_exceeded|max_model_len",
    re.IGNORECASE,
)
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]")
_MAX_CHAIN = 100


def ending_of(error: BaseException) -> Ending:
    """Return the ending for an exception: the first in its chain that says more than "it failed"."""
    for link in _chain(error):
        ending = _ending_of_one(link)
        if ending is not None:
            return ending
    return Ending.TOOL_ERROR


def describe(error: BaseException) -> str:
    """Format as ``Type: message`` on one line."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, WorkflowFailed):
        return one_line("; ".join(filter(None, (error.message, error.hint))), MAX_OWN_REASON_CHARS)
    message = _text(error)
    return one_line(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def one_line(text: str, limit: int = MAX_REASON_CHARS) -> str:
    """Collapse `text` to one line, escape control characters, and truncate to `limit`."""
    line = escape(" ".join(text[: 10 * limit].split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def escape(text: str) -> str:
    """Escape control characters and broken Unicode, so that they cannot affect a terminal or a log."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def says_overflow(text: str) -> bool:
    """Return True if an engine's message means that the conversation no longer fits the model."""
    return _OVERFLOW_TEXT.search(text) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, its causes and contexts, and the members of groups, each once."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending and len(seen) < _MAX_CHAIN:
        link = pending.pop(0)
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        members = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        pending.extend([*members, link.__cause__, link.__context__])


def _ending_of_one(error: BaseException) -> Ending | None:
    if isinstance(error, WorkflowFailed):
        return error.ending
    names = {parent.__name__ for parent in type(error).__mro__}
    if names & _OVERFLOW_ERRORS:
        return Ending.CONTEXT_OVERFLOW
    if names & _CONNECTION_ERRORS:
        return Ending.INFRASTRUCTURE
    status = _status(error)
    if status is None:
        return None
    if status >= 500 or status == 429:
        return Ending.INFRASTRUCTURE
    if status == 400 and says_overflow(f"{_text(error)} {_body(error)}"):
        return Ending.CONTEXT_OVERFLOW
    return None


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an exception, from itself or its `response`."""
    for holder in (error, _attribute(error, "response")):
        for name in ("status_code", "status"):
            value = _attribute(holder, name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _body(error: BaseException) -> str:
    parts = (_attribute(error, "body"), _attribute(_attribute(error, "response"), "text"))
    return " ".join(str(part) for part in parts if isinstance(part, str | bytes | dict))


def _attribute(holder: Any, name: str) -> Any:
    """Read an attribute of a foreign object; None if that fails: some raise until the body has been read."""
    try:
        return getattr(holder, name, None)
    except Exception:  # noqa: BLE001 - a foreign property may raise anything; the error itself is reported anyway
        return None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - a foreign __str__ may raise; say so instead of the message
        return f"(its message cannot be shown: {type(broken).__name__})"
