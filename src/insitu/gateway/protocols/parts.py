"""Checks of a request's parts, by the rule of the whole: the unknown is rejected, never ignored."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from insitu.errors import InvalidRequest
from insitu.gateway.protocols.request import SAMPLING_FIELDS
from insitu.gateway.shared.faults import reading, text_of

MEDIA_KINDS = (
    *("image", "image_url", "input_image", "audio", "input_audio", "audio_url", "video", "video_url"),
    *("document", "file", "input_file", "image_embeds", "audio_embeds"),
)
"""A tuple: a client may send a list or an object as the type of a part, which no set can look up."""
_TOOL_DEFAULTS = (("defer_loading", False), ("allowed_callers", ["direct"]))
EXTRA_SAMPLING = (SAMPLING_FIELDS | {"chat_template_kwargs"}) - {"max_tokens", "stop", "response_format"}
"""Parameters of the engine's chat requests that the other protocols accept under the same names."""


def objects(value: object, where: str) -> list[dict[str, Any]]:
    """Return a list of objects, or raise InvalidRequest."""
    items = cast("list[object]", value) if isinstance(value, list) else [None]
    if not all(isinstance(item, dict) for item in items):
        raise InvalidRequest(f"`{where}` must be a list of objects.")
    return cast("list[dict[str, Any]]", items)


def check_fields(part: dict[str, Any], allowed: Collection[str], where: str = "") -> None:
    """Reject fields that are set but not allowed."""
    unknown = sorted(key for key, value in part.items() if value is not None and key not in allowed)
    if unknown:
        named = ", ".join(f"`{where}.{key}`" if where else f"`{key}`" for key in unknown)
        raise InvalidRequest(f"Not supported by this gateway: {named}.")


def check_tool_fields(tool: dict[str, Any], allowed: Collection[str], where: str) -> None:
    """Run `check_fields` on a tool, allowing defaults that clients spell out."""
    given = {key: value for key, value in tool.items() if (key, value) not in _TOOL_DEFAULTS}
    check_fields(given, allowed, where)


def text_field(part: dict[str, Any], key: str, where: str) -> str:
    """Return a field that must be a string."""
    value = part.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"`{where}.{key}` must be a string.")
    return value


def kind_refusal(kind: object, model: object, where: str) -> InvalidRequest:
    """Return the error that says why a part of this type is not accepted."""
    if kind in MEDIA_KINDS:
        return InvalidRequest(
            f"`{where}` has the type `{kind}`, but `{model}` is served for text only.",
            hint="describe its content in text instead",
        )
    return InvalidRequest(f"`{where}` has the type {kind!r}, which is not supported by this gateway.")


def joined(texts: list[str]) -> str | list[dict[str, Any]]:
    """Return the content of a chat message: one text as it is, several as parts that the engine joins."""
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts] or ""


def whole_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of an engine's whole answer, each with its id, name and arguments."""
    with reading():
        return [
            {
                "id": call["id"],
                "function": {
                    "name": call["function"]["name"],
                    "arguments": text_of(call["function"]["arguments"] or ""),
                },
            }
            for call in tool_calls(message)
        ]


def tool_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of a chat message or of a part of one."""
    return cast("list[dict[str, Any]]", message.get("tool_calls") or [])
