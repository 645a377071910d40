"""Keep secrets out of output."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from insitu.json_values import JsonObject, JsonValue

HIDDEN = "**********"

_SECRET_KEY = re.compile(
    r"(^|[_-])(api[_-]?keys?|token|password|passwd|secret|authorization)$", re.IGNORECASE
)

_CREDENTIALS = re.compile(r"://[^/@\s'\"]*@")


def names_a_secret(key: object) -> bool:
    """Return True if a key looks like a secret's, whatever its model says: `api_key`, `hf_token`."""
    return isinstance(key, str) and _SECRET_KEY.search(key) is not None


def hide(values: JsonObject, secret: bool = False) -> JsonObject:
    """Replace every string and number under a secret's key."""
    return {key: _hide(each, secret or names_a_secret(key)) for key, each in values.items()}


def _hide(value: JsonValue, secret: bool) -> JsonValue:
    if isinstance(value, dict):
        return hide(value, secret)
    if isinstance(value, list):
        return [_hide(each, secret) for each in value]
    return HIDDEN if secret and value else value


def without_credentials(text: str) -> str:
    """Replace the user and password in every URL of a text."""
    return _CREDENTIALS.sub(f"://{HIDDEN}@", text)


def shown(value: object, limit: int = 80) -> str:
    """Format a value as YAML writes it, for an error; never a mapping or list, which may hold secrets."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
