"""Keep secrets out of output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

HIDDEN = "**********"

_SECRET_KEY = re.compile(
    r"(^|[_-])(api[_-]?keys?|token|password|passwd|secret|authorization)$", re.IGNORECASE
)

_CREDENTIALS = re.compile(r"://[^/@\s'\"]*@")


def names_a_secret(key: object) -> bool:
    """Return True if a key looks like a secret's, whatever its model says: `api_key`, `hf_token`."""
    return isinstance(key, str) and _SECRET_KEY.search(key) is not None


def hide(value: Any, secret: bool = False) -> Any:
    """Replace every string and number under a secret's key."""
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {key: hide(each, secret or names_a_secret(key)) for key, each in items}
    if isinstance(value, list):
        return [hide(each, secret) for each in cast("list[Any]", value)]
    return HIDDEN if secret and value and isinstance(value, str | int | float) else value


def without_credentials(text: str) -> str:
    """Replace the user and password in every URL of a text."""
    return _CREDENTIALS.sub(f"://{HIDDEN}@", text)


def shown(value: Any, limit: int = 80) -> str:
    """Format a value for an error message. Mappings and lists are not printed: they may hold secrets."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "null"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
