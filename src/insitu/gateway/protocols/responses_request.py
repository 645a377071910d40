"""Convert OpenAI's response requests to chat requests.

The items of one answer (reasoning, text, function calls) become one assistant message again.
"""

from __future__ import annotations

from typing import Any, cast

from insitu.errors import InvalidRequest
from insitu.gateway.protocols.kept_items import KeptItems
from insitu.gateway.protocols.parts import (
    joined,
    kind_refusal,
    known_fields,
    objects,
    text_field,
)
from insitu.gateway.protocols.request import EXTRA_SAMPLING, check_object

LOGPROBS = "message.output_text.logprobs"
_OWN = frozenset(
    {"model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning"}
    | {"max_output_tokens", "stream", "stream_options", "include", "top_logprobs", "stop"}
)
# Fields of OpenAI's own service, or about tools that are rejected: they have no effect on an answer.
_BOOKKEEPING = frozenset(
    {"store", "metadata", "user", "safety_identifier", "service_tier", "prompt_cache_key", "max_tool_calls"}
    | {"prompt_cache_retention", "prompt_cache_options"}
)
_NEUTRAL = {"background": (False,), "truncation": ("disabled",)}
FIELDS = _OWN | _BOOKKEEPING | EXTRA_SAMPLING | _NEUTRAL.keys()
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_PART = frozenset({"type", "text", "refusal", "annotations", "logprobs", "prompt_cache_breakpoint"})
_MESSAGE = frozenset({"type", "id", "role", "content", "status", "phase"})
_CALL = frozenset({"type", "id", "call_id", "name", "arguments", "status", "caller"})
_OUTPUT = frozenset({"type", "id", "call_id", "output", "status", "caller", "name"})
_REASONING = frozenset({"type", "id", "summary", "content", "encrypted_content", "status"})


def to_chat(body: dict[str, Any], kept: KeptItems) -> dict[str, Any]:
    """Convert a request to chat; InvalidRequest names what is rejected and why. It may refer to `kept`."""
    if body.get("previous_response_id") is not None or body.get("conversation") is not None:
        raise InvalidRequest(
            "`previous_response_id` and `conversation` are not supported, as no conversations are kept here: "
            "send the earlier items again in `input`, with the `output` of each answer."
        )
    for key, neutral in _NEUTRAL.items():
        if body.get(key) not in (None, *neutral):
            raise InvalidRequest(f"`{key}` is {body[key]!r}, which is not supported by this gateway.")
    body = known_fields(body, FIELDS)
    chat = {key: value for key, value in body.items() if key in EXTRA_SAMPLING}
    chat |= {key: body[key] for key in ("model", "stream", "stop") if key in body}
    chat["messages"] = _messages(body, kept)
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    return chat | _tools(body) | _text(body) | _reasoning(body) | _logprobs(body)


def _messages(body: dict[str, Any], kept: KeptItems) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    if body.get("instructions") is not None:
        chat.append({"role": "system", "content": text_field(body, "instructions", "body")})
    given = body.get("input")
    if isinstance(given, str):
        return [*chat, {"role": "user", "content": given}]
    turn = _Turn(chat, body.get("model"), kept)
    for i, item in enumerate(objects(given, "input")):
        turn.add(item, f"input[{i}]")
    if turn.reasoning:
        chat.append({"role": "assistant", "content": "", "reasoning": turn.reasoning})
    return chat


class _Turn:
    """Adds items to chat messages; the items of one answer go into one message."""

    def __init__(self, chat: list[dict[str, Any]], model: object, kept: KeptItems) -> None:
        self._chat, self._model, self._kept = chat, model, kept
        self.reasoning = ""
        """The reasoning before the next message."""

    def add(self, item: dict[str, Any], where: str) -> None:
        match item.get("type") or ("message" if "role" in item else None):
            case "message":
                self._message(item, where)
            case "function_call":
                item = known_fields(item, _CALL, where)
                function = {key: text_field(item, key, where) for key in ("name", "arguments")}
                call = {"id": text_field(item, "call_id", where), "type": "function", "function": function}
                self._answer(None).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                item = known_fields(item, _OUTPUT, where)
                texts = self._texts(item.get("output"), f"{where}.output")
                call_id = text_field(item, "call_id", where)
                self._chat.append({"role": "tool", "tool_call_id": call_id, "content": joined(texts)})
            case "reasoning":
                item = known_fields(item, _REASONING, where)
                self.reasoning += self._thought(item, where)
            case "item_reference":
                item_id = item.get("id")
                if (found := self._kept.find(item_id)) is None:
                    raise InvalidRequest(
                        f"`{where}` refers to {item_id!r}, which is not among the latest items here: "
                        "send the item itself (clients do so with `store: false`)."
                    )
                self.add(found, where)
            case kind:
                raise kind_refusal(kind, self._model, where)

    def _message(self, item: dict[str, Any], where: str) -> None:
        item = known_fields(item, _MESSAGE, where)
        texts = self._texts(item.get("content"), f"{where}.content")
        if item.get("role") == "assistant":
            message = self._answer("".join(texts))
            message["content"] = (message["content"] or "") + "".join(texts)
        elif item.get("role") in ("user", "system", "developer"):
            self._chat.append({"role": item["role"], "content": joined(texts)})
        else:
            raise InvalidRequest(
                f"`{where}.role` is {item.get('role')!r}; it must be user, assistant, system or developer."
            )

    def _answer(self, text: str | None) -> dict[str, Any]:
        """Return the assistant message for the next item: the last one, unless it is another answer's."""
        last = self._chat[-1] if self._chat else {}
        another = text is not None and last.get("content") is not None and not last.get("tool_calls")
        if last.get("role") != "assistant" or self.reasoning or another:
            last = {"role": "assistant", "content": None}
            if self.reasoning:
                last["reasoning"], self.reasoning = self.reasoning, ""
            self._chat.append(last)
        return last

    def _texts(self, content: object, where: str) -> list[str]:
        if isinstance(content, str):
            return [content]
        texts: list[str] = []
        for i, part in enumerate(objects(content, where)):
            place, kind = f"{where}[{i}]", part.get("type")
            if kind not in _TEXT_PARTS:
                raise kind_refusal(kind, self._model, place)
            part = known_fields(part, _PART, place)
            texts.append(text_field(part, "refusal" if kind == "refusal" else "text", place))
        return texts

    def _thought(self, item: dict[str, Any], where: str) -> str:
        for key in ("content", "summary"):
            if item.get(key):
                return "".join(self._texts(item[key], f"{where}.{key}"))
        if item.get("encrypted_content"):
            raise InvalidRequest(
                f"`{where}` is encrypted, and only its maker can read it.", hint="omit the item"
            )
        return ""


def _tools(body: dict[str, Any]) -> dict[str, Any]:
    tools: list[dict[str, Any]] = []
    for i, tool in enumerate(objects(body.get("tools") or [], "tools")):
        where = f"tools[{i}]"
        if tool.get("type") != "function":
            raise InvalidRequest(
                f"`{where}` has the type {tool.get('type')!r}: only the agent's own functions are supported.",
                hint="offer it as a function",
            )
        tool = known_fields(tool, ("type", "name", "description", "parameters", "strict"), where)
        parameters = check_object(tool, "parameters")
        function: dict[str, Any] = {"name": text_field(tool, "name", where), "parameters": parameters}
        function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
        tools.append({"type": "function", "function": function})
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        named = known_fields(check_object(body, "tool_choice"), ("type", "name"), "tool_choice")
        if named.get("type") != "function":
            raise InvalidRequest(f"`tool_choice` of type {named.get('type')!r} is not supported.")
        name = text_field(named, "name", "tool_choice")
        choice = {"type": "function", "function": {"name": name}}
    if not tools:
        if choice in (None, "auto", "none"):
            return {}
        raise InvalidRequest("`tool_choice` asks for a tool, but `tools` is empty.")
    chat: dict[str, Any] = {"tools": tools, "tool_choice": choice or "auto"}
    if body.get("parallel_tool_calls") is not None:
        chat["parallel_tool_calls"] = body["parallel_tool_calls"]
    return chat


def _text(body: dict[str, Any]) -> dict[str, Any]:
    text = check_object(body, "text")
    text = known_fields(text, ("format",), "text")
    wanted = check_object(text, "format")
    match wanted.get("type", "text"):
        case "text":
            return {}
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            wanted = known_fields(wanted, ("type", "name", "description", "schema", "strict"), "text.format")
            schema = {k: v for k, v in wanted.items() if k != "type" and v is not None}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case kind:
            raise InvalidRequest(
                f"`text.format.type` is {kind!r}; it must be text, json_schema or json_object."
            )


def _reasoning(body: dict[str, Any]) -> dict[str, Any]:
    reasoning = check_object(body, "reasoning")
    reasoning = known_fields(reasoning, ("effort", "summary", "generate_summary", "context"), "reasoning")
    for key in ("summary", "generate_summary", "context"):
        if reasoning.get(key) not in (None, "auto"):
            raise InvalidRequest(
                f"`reasoning.{key}` is {reasoning[key]!r}; reasoning is shown as the model wrote it.",
                hint=f"omit `reasoning.{key}`",
            )
    return {} if reasoning.get("effort") is None else {"reasoning_effort": reasoning["effort"]}


def _logprobs(body: dict[str, Any]) -> dict[str, Any]:
    include: object = body.get("include") or []
    if not isinstance(include, list):
        raise InvalidRequest("`include` must be a list of strings.")
    wanted = LOGPROBS in cast("list[object]", include)
    if body.get("top_logprobs") and not wanted:
        raise InvalidRequest(f"`top_logprobs` needs `{LOGPROBS}` in `include`.")
    return {"logprobs": True, "top_logprobs": body.get("top_logprobs") or 0} if wanted else {}
