"""Convert Anthropic's message requests to chat requests.

A `tool_result` becomes a tool message, a `thinking` block the message's `reasoning`; the texts of one
assistant message are joined as they are, so that an answer sent back has the text that was sampled.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, cast

from insitu.errors import InvalidRequest
from insitu.gateway.protocols.parts import (
    joined,
    kind_refusal,
    known_fields,
    objects,
    text_field,
)
from insitu.gateway.protocols.request import EXTRA_SAMPLING, check_object

_OWN = frozenset(
    {"model", "messages", "max_tokens", "system", "stream", "stop_sequences", "tools", "tool_choice"}
    | {"thinking", "output_config"}
)
# Fields of Anthropic's own service that have no effect on an answer.
_BOOKKEEPING = frozenset(
    {"metadata", "cache_control", "service_tier", "inference_geo", "speed", "diagnostics", "betas"}
    | {"user_profile_id", "workspace_id"}
)
FIELDS = _OWN | _BOOKKEEPING | EXTRA_SAMPLING
_BLOCK = frozenset({"type", "cache_control"})
_TOOL = _BLOCK | {"name", "description", "input_schema", "strict", "eager_input_streaming"}
INVALID_JSON = "INVALID_JSON"
"""The key that wraps arguments that are not an object, as Anthropic recommends."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Convert a request to chat; InvalidRequest names what is rejected and why."""
    body = known_fields(body, FIELDS)
    if body.get("max_tokens") is None:
        raise InvalidRequest("`max_tokens` is missing.")
    chat = {key: value for key, value in body.items() if key in EXTRA_SAMPLING}
    chat |= {key: body[key] for key in ("model", "max_tokens", "stream") if key in body}
    chat["messages"] = _messages(body)
    stops = cast("object", body.get("stop_sequences") or [])
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in cast("list[object]", stops)):
        raise InvalidRequest("`stop_sequences` must be a list of strings.")
    chat["stop"] = stops
    if body.get("tools"):
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(objects(body["tools"], "tools"))]
    return chat | _tool_choice(body) | _thinking(body) | _output(body)


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    model, chat = body.get("model"), list[dict[str, Any]]()
    if body.get("system"):
        chat.append({"role": "system", "content": joined(_texts(body["system"], model, "system"))})
    given = objects(body.get("messages"), "messages")
    for i, message in enumerate(given):
        where, role = f"messages[{i}]", message.get("role")
        message = known_fields(message, ("role", "content"), where)
        content = message.get("content")
        if role == "assistant":
            chat.append(_assistant(_blocks(content, f"{where}.content"), model))
        elif role == "user":
            chat += _user(_blocks(content, f"{where}.content"), model)
        elif role == "system":
            chat.append({"role": "system", "content": joined(_texts(content, model, f"{where}.content"))})
        else:
            raise InvalidRequest(f"`{where}.role` is {role!r}; it must be user, assistant or system.")
    if not given or given[-1].get("role") == "assistant":
        raise InvalidRequest(
            "`messages` must end with a user message: an answer that has begun cannot be continued.",
            hint="say in the instructions how the answer should start",
        )
    return chat


Blocks = list[tuple[str, dict[str, Any]]]
"""Content blocks, each with its place in the request."""


def _blocks(content: object, where: str) -> Blocks:
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    return [(f"{where}[{i}]", block) for i, block in enumerate(objects(content, where))]


def _texts(content: object, model: object, where: str) -> list[str]:
    """Return the texts of content that may hold nothing else."""
    return [_text(block, model, place) for place, block in _blocks(content, where)]


def _text(block: dict[str, Any], model: object, where: str) -> str:
    if block.get("type") != "text":
        raise kind_refusal(block.get("type"), model, where)
    block = known_fields(block, _BLOCK | {"text", "citations"}, where)
    return text_field(block, "text", where)


def _user(blocks: Blocks, model: object) -> list[dict[str, Any]]:
    """Convert a user message to chat messages, tool results apart from what the user says."""
    chat: list[dict[str, Any]] = []
    texts: list[str] = []
    for where, block in blocks:
        if block.get("type") == "tool_result":
            if texts:
                chat.append({"role": "user", "content": joined(texts)})
                texts = []
            chat.append(_tool_result(block, model, where))
        else:
            texts.append(_text(block, model, where))
    if texts or not chat:
        chat.append({"role": "user", "content": joined(texts)})
    return chat


def _tool_result(block: dict[str, Any], model: object, where: str) -> dict[str, Any]:
    block = known_fields(block, _BLOCK | {"tool_use_id", "content", "is_error"}, where)
    texts = _texts(block.get("content") or "", model, f"{where}.content")
    if block.get("is_error"):  # a chat message has no place for it but its text
        texts = texts or [""]
        texts[0] = texts[0] if texts[0].lower().startswith("error") else f"Error: {texts[0]}"
    return {"role": "tool", "tool_call_id": text_field(block, "tool_use_id", where), "content": joined(texts)}


def _assistant(blocks: Blocks, model: object) -> dict[str, Any]:
    text = reasoning = ""
    calls: list[dict[str, Any]] = []
    for where, block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            block = known_fields(block, _BLOCK | {"id", "name", "input", "caller"}, where)
            arguments = _arguments(check_object(block, "input"))
            function = {"name": text_field(block, "name", where), "arguments": arguments}
            calls.append({"id": text_field(block, "id", where), "type": "function", "function": function})
        elif kind == "thinking":
            block = known_fields(block, _BLOCK | {"thinking", "signature"}, where)
            reasoning += text_field(block, "thinking", where)
        else:
            text += _text(block, model, where)
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if reasoning:
        message["reasoning"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


def _arguments(given: dict[str, Any]) -> str:
    """Return a call's arguments as text; what was wrapped for the client is unwrapped if it is valid JSON."""
    wrapped = given.get(INVALID_JSON)
    if len(given) == 1 and isinstance(wrapped, str):
        with suppress(json.JSONDecodeError):
            json.loads(wrapped)
            return wrapped
    return json.dumps(given, ensure_ascii=False)


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"`{where}` has the type `{tool['type']}`: only tools that the agent runs itself are supported.",
            hint="give the tool a name and an `input_schema`",
        )
    tool = known_fields(tool, _TOOL, where)
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidRequest(f"`{where}.input_schema` must be an object.")
    function = {"name": text_field(tool, "name", where), "parameters": tool["input_schema"]}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(body: dict[str, Any]) -> dict[str, Any]:
    choice = check_object(body, "tool_choice")
    if not choice:
        return {}
    choice = known_fields(choice, ("type", "name", "disable_parallel_tool_use"), "tool_choice")
    if choice.get("type") == "tool":
        name = text_field(choice, "name", "tool_choice")
        chosen: Any = {"type": "function", "function": {"name": name}}
    elif choice.get("type") in tuple(_CHOICES):
        chosen = _CHOICES[choice["type"]]
    else:
        raise InvalidRequest(
            f"`tool_choice.type` is {choice.get('type')!r}; it must be auto, any, tool or none."
        )
    if not body.get("tools"):
        if chosen in ("auto", "none"):
            return {}
        raise InvalidRequest("`tool_choice` asks for a tool, but `tools` is empty.")
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": chosen, **parallel}


def _thinking(body: dict[str, Any]) -> dict[str, Any]:
    thinking = check_object(body, "thinking")
    if not thinking:
        return {}
    thinking = known_fields(thinking, ("type", "budget_tokens", "display"), "thinking")
    if thinking.get("display") == "omitted":
        raise InvalidRequest("`thinking.display: omitted` is not supported: thinking is always shown.")
    match thinking.get("type"):
        case "enabled":
            return {"thinking_token_budget": thinking.get("budget_tokens")}
        case "disabled":
            return {"reasoning_effort": "none"}
        case "adaptive":
            return {}
        case other:
            raise InvalidRequest(f"`thinking.type` is {other!r}; it must be enabled, disabled or adaptive.")


def _output(body: dict[str, Any]) -> dict[str, Any]:
    config = check_object(body, "output_config")
    config = known_fields(config, ("effort", "format"), "output_config")
    chat: dict[str, Any] = {}
    if config.get("effort") is not None and check_object(body, "thinking").get("type") != "disabled":
        chat["reasoning_effort"] = config["effort"]
    wanted = check_object(config, "format")
    if wanted:
        wanted = known_fields(wanted, ("type", "schema"), "output_config.format")
        if wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
            raise InvalidRequest("`output_config.format` must have the type json_schema and a `schema`.")
        schema = {"name": "output", "schema": wanted["schema"], "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat
