"""Read the value of a short key as the entry it stands for: `agent: agent:run` is a workflow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from urllib.parse import urlsplit

from insitu import plugins
from insitu.config.values.file_types import TYPE_BY_SUFFIX
from insitu.config.values.secret import shown
from insitu.given import Given
from insitu.json_values import JsonObject, JsonValue
from insitu.plugins import Kind

_URL = ("http://", "https://")


class CannotRead(Exception):
    """The value stands for nothing; the message is the rest of the sentence that its key begins."""


def long_value(key: str, value: JsonValue) -> JsonValue:
    """Return what the value of a short key means at the key's place. Raises `CannotRead`."""
    if isinstance(value, str) and key in _TEXTS:
        return _TEXTS[key](value)
    if isinstance(value, dict) and key in GUESSES:
        return _with_type(value, GUESSES[key])
    if isinstance(value, dict) or key not in _TEXTS:
        return value
    raise CannotRead(f"should be {_EXPECTED[key]}, or a mapping, not {shown(value)}")


def _model(text: str) -> JsonObject:
    return {"_type": "openai", "model_name": text}


def _agent(text: str) -> JsonObject:
    if text.startswith(_URL):
        return {"_type": "http", "url": text}
    if ":" not in text:
        raise CannotRead(f"should be {_EXPECTED['agent']}, not {shown(text)}")
    return {"_type": "python", "entry": text}


def _data(text: str) -> JsonObject:
    if isinstance(text, Given):  # the name of a function may end like that of a file
        return {"_type": "custom", "function": text}
    suffix = PurePath(text).suffix.lower()
    if suffix in TYPE_BY_SUFFIX:
        return {"_type": TYPE_BY_SUFFIX[suffix], "file_path": text}
    if ":" in text:
        return {"_type": "custom", "function": text}
    raise CannotRead(
        f"should be {_EXPECTED['data']}, not {shown(text)} (files: {', '.join(sorted(TYPE_BY_SUFFIX))})"
    )


def _reward(text: str) -> JsonObject:
    known = plugins.names(Kind.EVALUATOR)
    if text in known:
        return {"_type": text}
    if ":" in text or "." in text:
        return {"_type": "python", "entry": text}
    near = plugins.nearest(text, known) or f" (evaluators: {', '.join(known)})"
    raise CannotRead(f"should be {_EXPECTED['reward']}, not {shown(text)}{near}")


def _backend(text: str) -> JsonObject:
    try:
        parts = urlsplit(text if text.startswith(_URL) else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or parts_beyond_the_address(text):
        raise CannotRead(f"should be {_EXPECTED['backend']}, not {shown(text)}")
    address: JsonObject = {"ip": host} if port is None else {"ip": host, "port": port}
    return address | ({"tls": True} if text.startswith("https://") else {})


def parts_beyond_the_address(text: str) -> bool:
    """Return True if a path, a query or credentials follow or precede the address."""
    parts = urlsplit(text if text.startswith(_URL) else f"http://{text}")
    return bool(parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc)


def _with_type(value: JsonObject, guesses: Mapping[str, Sequence[str]]) -> JsonObject:
    """Add the `_type` that the mapping's own keys leave no doubt about."""
    if "_type" in value:
        return value
    for key, types in guesses.items():
        if key in value:
            type_name = types[0] if len(types) == 1 else _type_of_file(value[key])
            return value if type_name is None else {"_type": type_name, **value}
    return value


def _type_of_file(path: JsonValue) -> str | None:
    return TYPE_BY_SUFFIX.get(PurePath(path).suffix.lower()) if isinstance(path, str) else None


_TEXTS: dict[str, Callable[[str], JsonObject]] = {
    "model": _model,
    "agent": _agent,
    "data": _data,
    "reward": _reward,
    "backend": _backend,
}
_EXPECTED = {
    "model": "the name of a model",
    "agent": "module:function or the URL of a service",
    "data": "a file or module:function",
    "reward": "module:function or the `_type` of an evaluator",
    "backend": "an address such as http://127.0.0.1:7623",
}
GUESSES: dict[str, dict[str, Sequence[str]]] = {
    "agent": {"entry": ("python",), "command": ("command",), "url": ("http",)},
    "data": {"function": ("custom",), "file_path": sorted(set(TYPE_BY_SUFFIX.values()))},
    "reward": {"entry": ("python",), "command": ("command",)},
}
"""The types that a key of a mapping without `_type` stands for; of several, the extension selects one."""
